#pragma once

// Internal: a view of a sharded parameter that was taken without grad mode, as `weight.t()`. Whether it is to be whole or a
// DTensor is known where it is read: beside an activation, or beside a gradient. Until then nothing is gathered or moved.

#include <ATen/core/Tensor.h>

#include <span>
#include <string_view>
#include <vector>

#include <tessera/fsdp/group/sharded_parameter.h>
#include <tessera/reads/operator_traits.h>

namespace tessera::internal {

/// An operator that gave a view of its first argument.
struct ViewStep {
  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments; ///< in the place of the first, what was viewed is to be put
  size_t output;                      ///< which of its results
};

/// The meta of such a view. It has the key `DeferredInit`, so that `on_touch` sees every op that reads it. Its `local` and `spec`
/// are those of the DTensor that it is, once `check_has_values` has asked the parameter for them.
struct ParameterView final : ParameterMeta {
  ParameterView(at::Tensor viewed, at::Tensor shape, std::vector<ViewStep> made_by);
  void check_has_values(std::string_view reader) override;
  at::Tensor realized() const override;
  ParameterView* as_view() override { return this; }
  /// The meta of the parameter that it is a view of; an error once the group of that is gone.
  ParameterMeta& parameter_meta() const;

  at::Tensor parameter;        ///< another handle of it, of its `detach()` or its `data()`
  at::Tensor geometry;         ///< a meta tensor that is the same view of one like the whole parameter
  std::vector<ViewStep> steps; ///< from the parameter to the view
};

/// The meta of `tensor` where that is such a view; null for any other.
inline ParameterView* parameter_view(const at::TensorBase& tensor) {
  auto* const read = read_meta(tensor);
  return read && read->kind == &kShardedParameters ? static_cast<ParameterMeta*>(read)->as_view() : nullptr;
}

/// Runs an op of which the first argument is a sharded parameter or such a view, and all other tensors too, for its geometry
/// alone. Puts its results on the stack where all are views; else leaves the stack as it is, and returns false. An operator that
/// asks another tensor for its shape (`view_as`) is taken apart instead: what was recorded of it would read that tensor too.
bool make_views(const c10::OperatorHandle& op, const OperatorTraits& traits, std::vector<c10::IValue>* stack);

/// `view` of `leaf`, the whole parameter.
at::Tensor view_of_whole(const ParameterView& view, const at::Tensor& leaf);

/// An error where autograd would have to find the way from what reads `tensor`, which is such a view, to a gradient of its own.
void check_needs_no_graph(const at::Tensor& tensor);

/// Puts the DTensors in the place of such views that they are.
void realize_views(const OperatorTraits& traits, std::span<c10::IValue> arguments);

} // namespace tessera::internal
