#include <tessera/fsdp/unsharded.h>

#include <ATen/core/grad_mode.h>

#include <tessera/fsdp/group/parallel_parameter.h>
#include <tessera/fsdp/group/parameter_group.h>
#include <tessera/fsdp/model/sharded_module.h>
#include <tessera/fsdp/reads/parameter_view.h>
#include <tessera/fsdp/reads/plain_read.h>

namespace tessera {

namespace internal {

namespace {

/// A tensor of the same values without what autograd knows of the leaf.
at::Tensor detached(const at::Tensor& leaf, const c10::VariableVersion& version) {
  return at::Tensor(leaf.unsafeGetTensorImpl()->shallow_copy_and_detach(version, /*allow_tensor_metadata_change=*/true));
}

/// What a read of the parameter itself gets. The graph of an earlier forward may end in the leaf of one that is frozen now, and
/// autograd passes over a leaf that requires no gradient when its backward runs.
const at::Tensor& leaf_of(ShardedParameter& parameter, bool requires_grad) {
  auto& leaf = parameter.leaf;
  if (requires_grad == leaf.requires_grad()) return leaf;
  if (requires_grad) return leaf.set_requires_grad(true);
  if (!parameter.other_leaves.frozen.defined())
    parameter.other_leaves.frozen = detached(leaf, leaf.unsafeGetTensorImpl()->version_counter());
  return parameter.other_leaves.frozen;
}

} // namespace

bool is_plain_in_forward(const ParameterMeta& meta, const at::Tensor& tensor) {
  const auto& parameter = meta.group->parameters()[meta.index];
  return parameter.leaf.defined() && !parameter.forward.parallel && is_same_leaf(parameter, tensor);
}

const at::Tensor& read_plain(const ParameterMeta& meta, const at::Tensor& tensor) {
  auto& group = *meta.group;
  schedule_of(group).read_parameter(group, meta.index, tensor.requires_grad() && at::GradMode::is_enabled());
  return leaf_of(group.parameters()[meta.index], tensor.requires_grad());
}

} // namespace internal

at::Tensor unsharded(const at::Tensor& tensor) {
  auto* meta = internal::parameter_meta(tensor);
  if (!meta) {
    const auto* view = internal::parameter_view(tensor);
    if (!view) return tensor;
    internal::check_needs_no_graph(tensor);
    return internal::view_of_whole(*view, unsharded(view->parameter));
  }
  if (C10_LIKELY(internal::is_plain_in_forward(*meta, tensor))) return internal::read_plain(*meta, tensor);
  auto& group = *meta->group;
  auto& parameter = group.parameters()[meta->index];
  TORCH_CHECK(parameter.leaf.defined(), "the parameter ", group.full_name(meta->index),
              " is on the meta device: call tessera::materialize before the first forward");
  const bool is_itself = internal::is_same_leaf(parameter, tensor);
  const bool trains = tensor.requires_grad() && at::GradMode::is_enabled();
  TORCH_CHECK(is_itself || !trains, "a detached copy of the sharded parameter ", group.full_name(meta->index),
              " that requires a gradient of its own is read: nothing would reduce that gradient. Use the parameter, or train "
              "a copy of its values (`detach().clone()`)");
  internal::schedule_of(group).read_parameter(group, meta->index, is_itself && trains);
  at::Tensor leaf =
      is_itself ? internal::leaf_of(parameter, tensor.requires_grad())
                : internal::detached(parameter.leaf, tensor.unsafeGetTensorImpl()->version_counter()); // `data()` counts its own
  if (!parameter.forward.parallel) return leaf;
  const auto& policy = group.options().mixed_precision;
  const auto whole = internal::gives_terms(parameter) ? internal::as_parallel_of_terms(leaf, *parameter.forward.parallel)
                                                      : internal::as_parallel(leaf, *parameter.forward.parallel);
  if (parameter.forward.mark) parameter.forward.mark->put_on(whole, policy.param_dtype && policy.cast_forward_inputs);
  return whole;
}

} // namespace tessera
