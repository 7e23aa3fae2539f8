#include <ATen/ops/clone.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <tessera/checkpoint/gathers.h>
#include <tessera/checkpoint/ranks.h>
#include <tessera/checkpoint/state_copy.h>
#include <tessera/dtensor/api.h>
#include <tessera/dtensor/dtensor_impl.h>

namespace tessera {

namespace {

// A tensor with memory of its own.
at::Tensor copy_of(const at::Tensor& tensor, bool to_host) {
  return to_host && !tensor.is_cpu() ? tensor.to(at::kCPU) : tensor.clone(at::MemoryFormat::Contiguous);
}

// Before anything is gathered: a rank that failed, or holds other tensors, would leave the others waiting.
void check_gathers(const StateDict& state) {
  constexpr auto kStep = "gather a state dict";
  const auto messages = checkpoint::Ranks().all(kStep, [&] {
    checkpoint::Gathers gathers;
    for (const auto& entry : state.entries()) {
      const auto* tensor = std::get_if<at::Tensor>(&entry.content);
      TORCH_CHECK(!tensor || !tensor->is_meta(), "state dict: \"", entry.name, "\" is a meta tensor, of which there is no copy");
      const auto* meta = tensor ? dtensor_meta(*tensor) : nullptr;
      if (meta) gathers.add(meta->spec->mesh().ranks(), entry.name);
    }
    return gathers.to_message();
  });
  checkpoint::Gathers::check_same(messages, kStep);
}

at::Tensor copy_of_part(const at::Tensor& tensor, bool to_host) {
  const auto* meta = dtensor_meta(tensor);
  return meta ? make_dtensor(copy_of(meta->local, to_host), meta->spec) : copy_of(tensor.detach(), to_host);
}

} // namespace

at::Tensor whole_tensor(const at::Tensor& tensor) {
  const c10::NoGradGuard no_grad;
  return is_dtensor(tensor) ? DTensor(tensor.detach()).full_tensor() : tensor.detach();
}

StateDict read_on_all_ranks(const std::string& step, const std::function<StateDict()>& read) {
  StateDict state;
  checkpoint::Ranks().all(step, [&] {
    state = read();
    return std::string();
  });
  return state;
}

StateDict copy_of(const StateDict& state, const StateDictOptions& options) {
  const c10::NoGradGuard no_grad;
  if (options.full_state_dict) check_gathers(state);
  const bool keep = !options.rank0_only || checkpoint::Ranks().rank() == 0;
  StateDict copy;
  for (const auto& entry : state.entries()) {
    if (!entry.is_tensor()) {
      if (keep) copy.set(entry.name, std::get<StateValue>(entry.content));
      continue;
    }
    const auto& tensor = std::get<at::Tensor>(entry.content);
    TORCH_CHECK(!tensor.is_meta(), "state dict: \"", entry.name, "\" is a meta tensor, of which there is no copy");
    if (!options.full_state_dict) {
      copy.add(entry.name, copy_of_part(tensor, options.cpu_offload), entry.aliases);
      continue;
    }
    const auto whole = whole_tensor(tensor);
    if (keep) copy.add(entry.name, copy_of(whole, options.cpu_offload), entry.aliases);
  }
  return copy;
}

} // namespace tessera
