#include <tessera/fsdp/meta_init.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/InferenceMode.h>

#include <unordered_set>
#include <utility>

#include <tessera/fsdp/gradient_hooks.h>
#include <tessera/fsdp/parameter_group.h>
#include <tessera/nn/sync_batch_norm.h>

namespace tessera {

namespace {

/// A tensor of a module, or of a group of its parameters, that has no memory yet.
struct Fresh {
  /// This rank's memory.
  const at::Tensor& local() const {
    const auto* meta = internal::parameter_meta(tensor);
    return meta ? meta->local : tensor;
  }
  bool was_written() const { return local().numel() == 0 || local()._version() != version || local().const_data_ptr() != data; }

  std::string name;
  at::Tensor tensor;
  uint32_t version = 0; ///< of the memory that it was given
  const void* data = nullptr;
};

std::vector<Fresh> tensors_on_meta(const torch::nn::Module& module) {
  std::vector<Fresh> fresh;
  std::unordered_set<const void*> seen;
  const auto visit = [&](std::string name, const at::Tensor& tensor) {
    if (!tensor.defined() || !seen.insert(tensor.unsafeGetTensorImpl()).second) return;
    Fresh one{std::move(name), tensor};
    if (one.local().is_meta()) fresh.push_back(std::move(one));
  };
  for (const auto& item : module.named_parameters()) visit(item.key(), item.value());
  for (const auto& item : module.named_buffers()) visit(item.key(), item.value());
  for (const auto& parameter : module.parameters()) { // a group gets memory as a whole
    const auto* meta = internal::parameter_meta(parameter);
    if (!meta || !seen.insert(meta->group).second) continue;
    const auto& members = meta->group->parameters();
    for (size_t i = 0; i < members.size(); ++i) visit(meta->group->full_name(i), at::Tensor(members[i].tensor.lock()));
  }
  return fresh;
}

} // namespace

std::vector<std::string> materialize(torch::nn::Module& module, const std::function<void(torch::nn::Module&)>& init) {
  TORCH_CHECK_VALUE(init, "tessera::materialize: init is an empty function");
  TORCH_CHECK_VALUE(!c10::InferenceMode::is_enabled(),
                    "tessera::materialize: called in InferenceMode, whose tensors cannot be trained; call it outside");
  const at::NoGradGuard no_grad;
  c10::Device device(c10::kCPU);
  auto fresh = tensors_on_meta(module);
  for (const auto& parameter : module.parameters()) {
    if (const auto* meta = internal::parameter_meta(parameter)) {
      auto& group = *meta->group; // which gives its parameters other metas
      device = group.axes().mesh().device();
      group.materialize();
      internal::redirect_gradients(group);
    }
  }
  const auto allocate = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_meta() || device.is_meta()) return;
    // set_data refuses the step from the meta device to another one.
    const auto allocated = at::empty_like(tensor, at::TensorOptions(device));
    internal::keep_synchronized(tensor, allocated);
    tensor.unsafeGetTensorImpl()->shallow_copy_from(allocated.getIntrusivePtr());
  };
  for (const auto& parameter : module.parameters()) allocate(parameter);
  for (const auto& buffer : module.buffers()) allocate(buffer);
  for (auto& one : fresh) {
    one.version = one.local()._version();
    one.data = one.local().const_data_ptr();
  }
  for (const auto& below : module.modules(/*include_self=*/false)) init(*below);
  init(module);
  std::vector<std::string> unwritten;
  for (const auto& one : fresh) {
    if (!one.was_written()) unwritten.push_back(one.name);
  }
  return unwritten;
}

} // namespace tessera
