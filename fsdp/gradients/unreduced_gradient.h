#pragma once

// Internal: what stands in grad() while a gradient waits for its reduction.

#include <ATen/core/Tensor.h>

#include <string_view>

#include <tessera/fsdp/group/parameter_group.h>
#include <tessera/reads/kind.h>

namespace tessera::internal {

/// The meta of a DTensor that stands in `grad()` for a gradient which was accumulated and not reduced, so that an optimizer, or
/// clipping, finds it there: any op that reads it is an error, and so are `to_local`, a save and the like. It has no values.
struct UnreducedGradient final : ReadMeta {
  UnreducedGradient(at::Tensor local_tensor, SpecPtr tensor_spec);
  void check_has_values(std::string_view reader) override;
  at::Tensor reduced; ///< what was in grad() before; what waits will be added to it
};

/// The meta of `tensor` where that stands for an unreduced gradient; null for any other.
UnreducedGradient* unreduced_gradient(const at::TensorBase& tensor);

/// Where the reduced gradient of `parameter` is, or will be: `grad()`, or what is kept aside while more of it waits.
at::Tensor& reduced_gradient(const at::Tensor& parameter);

/// Puts such a tensor in `grad()` of `parameter`, unless it is there.
void withhold_gradient(const ShardedParameter& parameter);
/// Puts back what it kept aside.
void release_gradient(const ShardedParameter& parameter);

} // namespace tessera::internal
