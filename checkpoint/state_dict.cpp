#include <c10/util/Exception.h>
#include <tessera/checkpoint/json.h>
#include <tessera/checkpoint/optimizer_state.h>
#include <tessera/checkpoint/state_copy.h>
#include <tessera/checkpoint/state_dict.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <functional>

namespace tessera {

void StateDict::insert(Entry entry) {
  const auto claim = [&](const std::string& name) {
    TORCH_CHECK(!name.empty(), "state dict: an empty name");
    TORCH_CHECK(name != "__metadata__", "state dict: the name \"__metadata__\" is reserved by the safetensors format");
    TORCH_CHECK(index_.emplace(name, entries_.size()).second, "state dict: the name \"", name, "\" is taken");
  };
  claim(entry.name);
  for (const auto& alias : entry.aliases) claim(alias);
  entries_.push_back(std::move(entry));
}

void StateDict::add(const std::string& name, at::Tensor tensor, std::vector<std::string> aliases) {
  TORCH_CHECK(tensor.defined(), "state dict: tensor \"", name, "\" is undefined");
  insert({name, std::move(tensor), std::move(aliases)});
}

void StateDict::set(const std::string& name, StateValue value) {
  const auto found = index_.find(name);
  if (found == index_.end()) return insert({name, std::move(value), {}});
  auto& entry = entries_[found->second];
  TORCH_CHECK(!entry.is_tensor(), "state dict: \"", name, "\" is a tensor, not a value");
  entry.content = std::move(value);
}

const StateDict::Entry& StateDict::entry(const std::string& name) const {
  const auto found = index_.find(name);
  TORCH_CHECK(found != index_.end(), "state dict: no entry \"", name, "\"");
  return entries_[found->second];
}

const at::Tensor& StateDict::tensor(const std::string& name) const {
  const auto& found = entry(name);
  TORCH_CHECK(found.is_tensor(), "state dict: \"", name, "\" is a value, not a tensor");
  return std::get<at::Tensor>(found.content);
}

const StateValue& StateDict::value(const std::string& name) const {
  const auto& found = entry(name);
  TORCH_CHECK(!found.is_tensor(), "state dict: \"", name, "\" is a tensor, not a value");
  return std::get<StateValue>(found.content);
}

void StateDict::throw_wrong_type(const std::string& name) const {
  TORCH_CHECK(false, "state dict: value \"", name, "\" is of another type: it is ", checkpoint::to_json(value(name)).dump());
}

void StateDict::erase(const std::string& name) {
  const auto found = index_.find(name);
  TORCH_CHECK(found != index_.end(), "state dict: no entry \"", name, "\"");
  const auto position = found->second;
  entries_.erase(entries_.begin() + static_cast<std::ptrdiff_t>(position));
  for (auto it = index_.begin(); it != index_.end();) {
    if (it->second == position) {
      it = index_.erase(it);
    } else {
      it->second -= it->second > position ? 1 : 0;
      ++it;
    }
  }
}

void StateDict::merge(const StateDict& other) {
  for (const auto& entry : other.entries_) insert(entry);
  bindings_.insert(bindings_.end(), other.bindings_.begin(), other.bindings_.end());
}

namespace {

StateDict own_tensors(const torch::nn::Module& module, bool ignore_frozen) {
  struct Named {
    std::string name;
    at::Tensor tensor;
    std::vector<std::string> aliases;
  };
  std::vector<Named> tensors;
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
    if (!ignore_frozen || parameter.value().requires_grad()) visit(parameter.key(), parameter.value());
  }
  for (const auto& buffer : module.named_buffers()) visit(buffer.key(), buffer.value());
  StateDict state;
  for (auto& [name, tensor, aliases] : tensors) state.add(name, tensor, std::move(aliases));
  return state;
}

StateDict with_options(const StateDictOptions& options, const std::function<StateDict()>& read) {
  TORCH_CHECK(!options.rank0_only || options.full_state_dict,
              "state dict: rank0_only needs full_state_dict: without it every rank holds a part");
  if (!options.full_state_dict && !options.cpu_offload) return read();
  return copy_of(options.full_state_dict ? read_on_all_ranks("gather a state dict", read) : read(), options);
}

} // namespace

StateDict state_dict(const torch::nn::Module& module, const StateDictOptions& options) {
  return with_options(options, [&] { return own_tensors(module, options.ignore_frozen_params); });
}

StateDict state_dict(const torch::nn::Module& module, torch::optim::Optimizer& optimizer, const StateDictOptions& options) {
  return with_options(options, [&] {
    auto state = own_tensors(module, options.ignore_frozen_params);
    state.merge(optimizer_state_dict(module, optimizer, options.flatten_optimizer_state_dict));
    return state;
  });
}

} // namespace tessera
