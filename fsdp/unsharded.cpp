#include <tessera/fsdp/unsharded.h>

#include <ATen/core/grad_mode.h>

#include <tessera/fsdp/parameter_group.h>
#include <tessera/fsdp/sharded_module.h>

namespace tessera {

at::Tensor unsharded(const at::Tensor& tensor) {
  auto* meta = internal::parameter_meta(tensor);
  if (!meta) return tensor;
  auto& group = *meta->group;
  auto& parameter = group.parameters()[meta->index];
  TORCH_CHECK(parameter.leaf.defined(), "the parameter ", group.full_name(meta->index),
              " is on the meta device: call tessera::materialize before the first forward");
  const bool is_itself = tensor.unsafeGetTensorImpl() == parameter.tensor._unsafe_get_target();
  const bool expects_gradient = is_itself && tensor.requires_grad() && at::GradMode::is_enabled();
  if (is_itself && parameter.leaf.requires_grad() != tensor.requires_grad())
    parameter.leaf.set_requires_grad(tensor.requires_grad());
  internal::schedule_of(group).touch_parameter(group, meta->index, expects_gradient);
  if (is_itself) return parameter.leaf;
  // Of `detach()` or `data()`: the latter counts its versions apart.
  return at::Tensor(parameter.leaf.unsafeGetTensorImpl()->shallow_copy_and_detach(tensor.unsafeGetTensorImpl()->version_counter(),
                                                                                  /*allow_tensor_metadata_change=*/true));
}

} // namespace tessera
