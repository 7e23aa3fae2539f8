#pragma once

// Internal: how many bytes the elements of a tensor are, whatever its strides.

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera::internal {

inline int64_t bytes_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

} // namespace tessera::internal
