#include <tessera/fsdp/unsharded.h>

#include <ATen/core/grad_mode.h>

#include <tessera/fsdp/parameter_group.h>
#include <tessera/fsdp/sharded_module.h>

namespace tessera {

namespace internal {

namespace {

/// Without what autograd knows of it.
at::Tensor detached(const at::Tensor& leaf, const c10::VariableVersion& version) {
  return at::Tensor(leaf.unsafeGetTensorImpl()->shallow_copy_and_detach(version, /*allow_tensor_metadata_change=*/true));
}

/// What a read of the parameter itself gets. The graph of an earlier forward may end in the leaf of one that is frozen now, and
/// autograd passes over a leaf that requires no gradient when its backward runs.
const at::Tensor& leaf_of(ShardedParameter& parameter, bool requires_grad) {
  auto& leaf = parameter.leaf;
  if (requires_grad == leaf.requires_grad()) return leaf;
  if (requires_grad) return leaf.set_requires_grad(true);
  if (!parameter.frozen_leaf.defined()) parameter.frozen_leaf = detached(leaf, leaf.unsafeGetTensorImpl()->version_counter());
  return parameter.frozen_leaf;
}

} // namespace

} // namespace internal

at::Tensor unsharded(const at::Tensor& tensor) {
  auto* meta = internal::parameter_meta(tensor);
  if (!meta) return tensor;
  auto& group = *meta->group;
  auto& parameter = group.parameters()[meta->index];
  TORCH_CHECK(parameter.leaf.defined(), "the parameter ", group.full_name(meta->index),
              " is on the meta device: call tessera::materialize before the first forward");
  const bool is_itself = internal::is_same_leaf(parameter, tensor);
  const bool trains = tensor.requires_grad() && at::GradMode::is_enabled();
  TORCH_CHECK(is_itself || !trains, "a detached copy of the sharded parameter ", group.full_name(meta->index),
              " that requires a gradient of its own is read: nothing would reduce that gradient. Use the parameter, or train "
              "a copy of its values (`detach().clone()`)");
  internal::schedule_of(group).touch_parameter(group, meta->index, is_itself && trains);
  if (is_itself) return internal::leaf_of(parameter, tensor.requires_grad());
  return internal::detached(parameter.leaf, tensor.unsafeGetTensorImpl()->version_counter()); // `data()` counts its own
}

} // namespace tessera
