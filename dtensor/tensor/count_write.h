#pragma once

// Internal: writes that kernels make in the memory of a part, below the level that counts versions.

#include <tessera/dtensor/tensor/dtensor_impl.h>

namespace tessera::internal {

/// Counts a write of a DTensor, and notes what state becomes that was made as zeros.
inline void count_write(const at::Tensor& dtensor) {
  auto* const meta = dtensor_meta(dtensor);
  if (meta->provenance.computed) meta->provenance.whole_dtype.reset();
  if (!dtensor.is_inference()) dtensor.unsafeGetTensorImpl()->bump_version();
  if (!meta->local.is_inference()) meta->local.unsafeGetTensorImpl()->bump_version();
}

} // namespace tessera::internal
