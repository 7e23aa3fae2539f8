#include <ATen/ops/clone.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <tessera/checkpoint/boxes/pieces.h>
#include <tessera/checkpoint/state/agreement.h>
#include <tessera/checkpoint/state/ranks.h>
#include <tessera/checkpoint/state/state_copy.h>
#include <tessera/dtensor/api.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>

namespace tessera::internal {

namespace {

// A tensor with memory of its own.
at::Tensor copy_of(const at::Tensor& tensor, bool to_host) {
  return to_host && !tensor.is_cpu() ? tensor.to(at::kCPU) : tensor.clone(at::MemoryFormat::Contiguous);
}

void check_readable(const std::string& name, const at::Tensor& tensor) {
  TORCH_CHECK(!tensor.is_meta(), "state dict: \"", name, "\" is a meta tensor, of which there is no copy");
  check_access(name, tensor, Access::kRead);
}

// Before anything is gathered: a rank that failed, or holds other tensors, would leave the others waiting.
void check_gathers(const StateDict& state) {
  const Ranks ranks;
  const auto messages = ranks.all("gather a state dict", [&] {
    Agreement agreement;
    for (const auto& entry : state.entries()) {
      const auto* tensor = std::get_if<at::Tensor>(&entry.content);
      if (!tensor) continue;
      check_readable(entry.name, *tensor);
      if (const auto* meta = dtensor_meta(*tensor)) agreement.add(meta->spec->mesh().ranks(), entry.name);
    }
    return agreement.to_message();
  });
  Agreement::check(messages, ranks, "gather a state dict");
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
  Ranks().all(step, [&] { state = read(); });
  return state;
}

StateDict copy_of(const StateDict& state, const StateDictOptions& options) {
  const c10::NoGradGuard no_grad;
  if (options.full_state_dict) check_gathers(state);
  const bool keep = !options.rank0_only || Ranks().rank() == 0;
  StateDict copy;
  for (const auto& entry : state.entries()) {
    if (!entry.is_tensor()) {
      if (keep) copy.set(entry.name, std::get<StateValue>(entry.content));
      continue;
    }
    const auto& tensor = std::get<at::Tensor>(entry.content);
    if (!options.full_state_dict) {
      check_readable(entry.name, tensor);
      copy.add(entry.name, copy_of_part(tensor, options.cpu_offload), entry.aliases);
      continue;
    }
    const auto whole = whole_tensor(tensor);
    if (keep) copy.add(entry.name, copy_of(whole, options.cpu_offload), entry.aliases);
  }
  for (const auto& name : state.submodules()) copy.add_submodule(name);
  return copy;
}

StateDict read_with_options(const StateDictOptions& options, const std::function<StateDict()>& read) {
  TORCH_CHECK(!options.rank0_only || options.full_state_dict,
              "state dict: rank0_only needs full_state_dict: without it every rank holds a part");
  if (!options.full_state_dict && !options.cpu_offload) return read();
  return copy_of(options.full_state_dict ? read_on_all_ranks("gather a state dict", read) : read(), options);
}

} // namespace tessera::internal
