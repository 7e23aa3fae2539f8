#include <tessera/checkpoint/state/model_state.h>
#include <tessera/checkpoint/state/optimizer_state.h>
#include <tessera/checkpoint/state/state_copy.h>
#include <tessera/checkpoint/state_dict.h>
#include <tessera/fsdp/setup/trains_apart.h>
#include <tessera/nn/follow_scripts.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <set>
#include <unordered_map>
#include <utility>

namespace tessera {

namespace internal {

std::vector<NamedTensor> named_tensors(const torch::nn::Module& module, const WhichTensors& which) {
  follow_scripts(module);
  std::vector<NamedTensor> tensors;
  std::unordered_map<const void*, size_t> seen;
  const auto visit = [&](const std::string& name, const at::Tensor& tensor) {
    const auto [found, is_new] = seen.emplace(tensor.unsafeGetTensorImpl(), tensors.size());
    if (is_new) {
      tensors.push_back({name, tensor, {}});
    } else {
      tensors[found->second].aliases.push_back(name);
    }
  };
  for (const auto& parameter : module.named_parameters()) {
    if (which.frozen || parameter.value().requires_grad()) visit(parameter.key(), parameter.value());
  }
  if (!which.buffers) return tensors;
  for (const auto& buffer : module.named_buffers()) visit(buffer.key(), buffer.value());
  return tensors;
}

} // namespace internal

namespace {

StateDict own_tensors(const torch::nn::Module& module, const StateDictOptions& options) {
  if (!options.allow_unsharded_params)
    internal::check_none_trains_apart(module, "state dict", "accept them with StateDictOptions::allow_unsharded_params");
  StateDict state;
  for (auto& [name, tensor, aliases] : internal::named_tensors(module, {.frozen = !options.ignore_frozen_params})) {
    for (auto& alias : aliases) alias = options.prefix + alias;
    state.add(options.prefix + name, tensor, std::move(aliases));
  }
  for (const auto& item : module.named_modules(/*name_prefix=*/"", /*include_self=*/false)) {
    if (item.value()->is_serializable()) state.add_submodule(options.prefix + item.key());
  }
  return state;
}

void check_names(c10::ArrayRef<NamedOptimizer> optimizers) {
  std::set<std::string> taken{"type", "state", "param_groups", "parameters"};
  for (const auto& [name, optimizer] : optimizers) {
    TORCH_CHECK(!name.empty() && name.find('.') == std::string::npos, "state dict: an optimizer has the name \"", name,
                "\"; it must not be empty and not contain a dot");
    TORCH_CHECK(taken.insert(name).second, "state dict: the name \"", name, "\" of an optimizer is taken");
  }
}

std::string name_in(const torch::nn::Module& module, const at::Tensor& parameter) {
  for (const auto& each : module.named_parameters()) {
    if (each.value().is_same(parameter)) return "\"" + each.key() + "\"";
  }
  return c10::str("of shape ", parameter.sizes());
}

void check_disjoint(const torch::nn::Module& module, c10::ArrayRef<NamedOptimizer> optimizers) {
  std::unordered_map<const void*, const std::string*> owners;
  for (const auto& [name, optimizer] : optimizers) {
    for (const auto& group : optimizer.param_groups()) {
      for (const auto& parameter : group.params()) {
        const auto* owner = owners.emplace(parameter.unsafeGetTensorImpl(), &name).first->second;
        TORCH_CHECK(*owner == name, "state dict: the optimizers \"", *owner, "\" and \"", name, "\" both hold the parameter ",
                    name_in(module, parameter), ": each would step it");
      }
    }
  }
}

} // namespace

StateDict state_dict(const torch::nn::Module& module, const StateDictOptions& options) {
  return internal::read_with_options(options, [&] { return own_tensors(module, options); });
}

StateDict state_dict(const torch::nn::Module& module, torch::optim::Optimizer& optimizer, const StateDictOptions& options) {
  return internal::read_with_options(options, [&] {
    auto state = own_tensors(module, options);
    state.merge(internal::optimizer_state_dict(module, {"", optimizer}, options));
    return state;
  });
}

/// An ArrayRef: GCC 12 takes `{.full_state_dict = true}` for a vector as well as for options.
StateDict state_dict(const torch::nn::Module& module, c10::ArrayRef<NamedOptimizer> optimizers, const StateDictOptions& options) {
  return internal::read_with_options(options, [&] {
    check_names(optimizers);
    check_disjoint(module, optimizers);
    auto state = own_tensors(module, options);
    for (const auto& each : optimizers) state.merge(internal::optimizer_state_dict(module, each, options));
    return state;
  });
}

} // namespace tessera
