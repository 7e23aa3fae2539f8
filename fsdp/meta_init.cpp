#include <tessera/fsdp/meta_init.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/InferenceMode.h>

#include <tessera/fsdp/parameter_group.h>

namespace tessera {

void materialize(torch::nn::Module& module, const std::function<void(torch::nn::Module&)>& init) {
  TORCH_CHECK_VALUE(init, "tessera::materialize: init is an empty function");
  TORCH_CHECK_VALUE(!c10::InferenceMode::is_enabled(),
                    "tessera::materialize: called in InferenceMode, whose tensors cannot be trained; call it outside");
  const at::NoGradGuard no_grad;
  c10::Device device(c10::kCPU);
  for (const auto& parameter : module.parameters()) {
    if (const auto* meta = fsdp_internal::parameter_meta(parameter)) {
      device = meta->group->axes().mesh().device();
      meta->group->materialize();
    }
  }
  const auto allocate = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_meta()) return;
    // set_data refuses the step from the meta device to another one.
    tensor.unsafeGetTensorImpl()->shallow_copy_from(at::empty_like(tensor, at::TensorOptions(device)).getIntrusivePtr());
  };
  for (const auto& parameter : module.parameters()) allocate(parameter);
  for (const auto& buffer : module.buffers()) allocate(buffer);
  for (const auto& below : module.modules(/*include_self=*/false)) init(*below);
  init(module);
}

} // namespace tessera
