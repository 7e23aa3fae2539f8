#pragma once

// Internal: what stands in grad() while a gradient waits for its reduction.

#include <ATen/core/Tensor.h>

#include <string_view>
#include <vector>

#include <tessera/fsdp/operator_traits.h>
#include <tessera/fsdp/parameter_group.h>

namespace tessera::internal {

/// The meta of a DTensor that stands in `grad()` for a gradient which was accumulated and not reduced, so that an optimizer, or
/// clipping, finds it there: any op that reads it is an error, and so are `to_local`, a save and the like. It has no values.
struct UnreducedGradient final : ParameterMeta {
  using ParameterMeta::ParameterMeta;
  void check_has_values(std::string_view reader) const override;
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

/// Runs an op that has an unreduced gradient among its arguments, the last of the stack: those of `zero_grad` alone, which
/// clears what was reduced. An error that names the gradient for any other.
void run_on_unreduced(const c10::OperatorHandle& op, const OperatorTraits& traits, std::vector<c10::IValue>* stack);

} // namespace tessera::internal
