#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <tessera/checkpoint/optimizer_fields.h>
#include <tessera/checkpoint/optimizer_state.h>
#include <tessera/dtensor/dtensor_impl.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <unordered_map>

namespace tessera {

namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamState;

std::string state_name(const std::string& parameter, const std::string& field) {
  return "optimizer.state." + parameter + "." + field;
}

std::string option_name(const std::string& group_or_parameter, const std::string& field) {
  return "optimizer.param_groups." + group_or_parameter + "." + field;
}
std::string option_name(size_t group, const std::string& field) { return option_name(std::to_string(group), field); }

// The names of a group's parameters are there exactly when the options are named by group.
bool is_flattened(const SavedState& saved) { return saved.values.count(option_name(0, "params")) == 0; }

// A zero tensor laid out as `parameter`: a DTensor of its spec, or a plain tensor.
at::Tensor zeros_like_parameter(const at::Tensor& parameter, at::ScalarType dtype) {
  const auto* meta = dtensor_meta(parameter);
  if (!meta) return at::zeros(parameter.sizes(), parameter.options().dtype(dtype).requires_grad(false));
  const auto& spec = *meta->spec;
  const auto& local = meta->local;
  return make_dtensor(at::zeros(local.sizes(), local.options().dtype(dtype)),
                      Spec::intern(spec.mesh(), spec.placements(), spec.sizes(), dtype, spec.strides()));
}

bool is_sharded_alike(const at::Tensor& parameter, const at::Tensor& kept) {
  return (dtensor_meta(parameter) != nullptr) == (dtensor_meta(kept) != nullptr);
}

// The parameters of an optimizer under the names that a module gives them.
struct NamedParameter {
  std::string name;
  at::Tensor tensor;
};
using NamedGroups = std::vector<std::vector<NamedParameter>>;

NamedGroups name_groups(const torch::nn::Module& module, const Optimizer& optimizer) {
  std::unordered_map<const void*, std::string> names;
  for (const auto& parameter : module.named_parameters()) names.emplace(parameter.value().unsafeGetTensorImpl(), parameter.key());
  NamedGroups groups;
  for (const auto& group : optimizer.param_groups()) {
    groups.emplace_back();
    for (const auto& parameter : group.params()) {
      const auto found = names.find(parameter.unsafeGetTensorImpl());
      TORCH_CHECK(found != names.end(), "state dict: parameter ", groups.back().size(), " of the optimizer's group ",
                  groups.size() - 1, ", of shape ", parameter.sizes(), ", is no parameter of the module");
      groups.back().push_back({found->second, parameter});
    }
  }
  return groups;
}

std::vector<std::string> names_of(const std::vector<NamedParameter>& group) {
  std::vector<std::string> names;
  names.reserve(group.size());
  for (const auto& parameter : group) names.push_back(parameter.name);
  return names;
}

class OptimizerBinding : public StateBinding {
 public:
  OptimizerBinding(const torch::nn::Module& module, Optimizer& optimizer, bool flatten)
      : optimizer_(optimizer), fields_(fields_of(optimizer)), groups_(name_groups(module, optimizer)), flattened_(flatten) {}

  void add_entries(StateDict& state) const;
  void before_load(StateDict& state, const SavedState& saved) override;
  void after_load(const StateDict& state) override;

 private:
  OptimizerParamState* state_of(const at::Tensor& parameter) const {
    const auto& states = optimizer_.state();
    const auto found = states.find(parameter.unsafeGetTensorImpl());
    return found == states.end() ? nullptr : found->second.get();
  }

  bool is_saved(const SavedState& saved) const { return saved.values.count("optimizer.type") > 0; }
  void add_options(StateDict& state) const;
  void remove_options(StateDict& state) const;
  void check_same_type(const SavedState& saved) const;
  void check_same_groups(const SavedState& saved) const;
  void check_same_options(const SavedState& saved, size_t group, const std::string& first, const std::string& second) const;
  std::vector<std::string> option_keys(const SavedState& saved) const;
  void fit_parameter(const NamedParameter& parameter, StateDict& state, const SavedState& saved) const;
  void restore_parameter(const NamedParameter& parameter, const StateDict& state) const;

  Optimizer& optimizer_;
  const OptimizerFields fields_;
  NamedGroups groups_;
  bool flattened_;                       // the options are named by parameter in the state dict
  std::vector<std::string> option_keys_; // of each group, while a checkpoint with an optimizer is loaded
};

void OptimizerBinding::add_options(StateDict& state) const {
  for (size_t g = 0; g < groups_.size(); ++g) {
    const auto& options = optimizer_.param_groups()[g].options();
    for (const auto& option : fields_.options) {
      const auto value = option.get(options);
      if (!flattened_) state.set(option_name(g, option.name), value);
      for (const auto& parameter : groups_[g]) {
        if (flattened_) state.set(option_name(parameter.name, option.name), value);
      }
    }
    if (!flattened_) state.set(option_name(g, "params"), StateValue(names_of(groups_[g])));
  }
}

void OptimizerBinding::remove_options(StateDict& state) const {
  std::vector<std::string> names;
  for (const auto& entry : state.entries()) {
    if (entry.name.starts_with("optimizer.param_groups.")) names.push_back(entry.name);
  }
  for (const auto& name : names) state.erase(name);
}

void OptimizerBinding::add_entries(StateDict& state) const {
  state.set("optimizer.type", StateValue(fields_.state.type));
  add_options(state);
  for (const auto& group : groups_) {
    for (const auto& [name, parameter] : group) {
      auto* kept = state_of(parameter);
      if (!kept) continue;
      for (const auto& field : fields_.state.tensors) {
        const auto& tensor = field.access(*kept);
        if (!tensor.defined()) continue;
        TORCH_CHECK(is_sharded_alike(parameter, tensor), "state dict: ", state_name(name, field.name),
                    " is a plain tensor and its parameter is sharded: the optimizer took a step before it was");
        state.add(state_name(name, field.name), tensor);
      }
      if (fields_.state.step) state.set(state_name(name, "step"), fields_.state.step(*kept));
    }
  }
}

void OptimizerBinding::check_same_type(const SavedState& saved) const {
  const auto* type = std::get_if<std::string>(&saved.values.at("optimizer.type"));
  TORCH_CHECK(type && *type == fields_.state.type, "the checkpoint holds the state of another optimizer than ",
              fields_.state.type, ": ", type ? *type : "?");
}

void OptimizerBinding::check_same_options(const SavedState& saved, size_t group, const std::string& first,
                                          const std::string& second) const {
  for (const auto& option : fields_.options) {
    const auto a = saved.values.find(option_name(first, option.name)), b = saved.values.find(option_name(second, option.name));
    if (a == saved.values.end() || b == saved.values.end()) continue; // reported as missing
    TORCH_CHECK(a->second == b->second, "parameter group ", group, " has one ", option.name,
                ", and the checkpoint holds different ones for \"", first, "\" and \"", second, "\"");
  }
}

// The name under which each group's options are saved: its number, or the first of its parameters that has been saved.
std::vector<std::string> OptimizerBinding::option_keys(const SavedState& saved) const {
  std::vector<std::string> keys;
  for (size_t g = 0; g < groups_.size(); ++g) {
    if (!flattened_) {
      keys.push_back(std::to_string(g));
      continue;
    }
    keys.emplace_back();
    for (const auto& [name, parameter] : groups_[g]) {
      if (saved.values.count(option_name(name, fields_.options[0].name)) == 0) continue; // reported as missing
      if (keys.back().empty()) keys.back() = name;
      check_same_options(saved, g, keys.back(), name);
    }
  }
  return keys;
}

void OptimizerBinding::check_same_groups(const SavedState& saved) const {
  size_t groups = 0;
  while (saved.values.count(option_name(groups, "params")) > 0) ++groups;
  TORCH_CHECK(groups == groups_.size(), "the checkpoint holds an optimizer with ", groups, " parameter groups, and here are ",
              groups_.size());
  for (size_t g = 0; g < groups; ++g) {
    const auto* names = std::get_if<std::vector<std::string>>(&saved.values.at(option_name(g, "params")));
    auto here = names_of(groups_[g]), there = names ? *names : std::vector<std::string>{};
    std::sort(here.begin(), here.end());
    std::sort(there.begin(), there.end());
    std::vector<std::string> differing;
    std::set_symmetric_difference(here.begin(), here.end(), there.begin(), there.end(), std::back_inserter(differing));
    TORCH_CHECK(differing.empty(), "parameter group ", g, " of the checkpoint's optimizer holds other parameters than here; ",
                differing.size(), " differ, the first is \"", differing.front(), "\"");
  }
}

// Entries for what the checkpoint holds, and none for what it does not.
void OptimizerBinding::fit_parameter(const NamedParameter& parameter, StateDict& state, const SavedState& saved) const {
  for (const auto& field : fields_.state.tensors) {
    const auto name = state_name(parameter.name, field.name);
    const auto found = saved.tensors.find(name);
    if (found == saved.tensors.end()) {
      if (state.contains(name)) state.erase(name);
    } else if (!state.contains(name)) {
      state.add(name, zeros_like_parameter(parameter.tensor, found->second.dtype));
    }
  }
  if (!fields_.state.step) return;
  const auto name = state_name(parameter.name, "step");
  if (saved.values.count(name) == 0) {
    if (state.contains(name)) state.erase(name);
  } else if (!state.contains(name)) {
    state.set(name, 0);
  }
}

void OptimizerBinding::before_load(StateDict& state, const SavedState& saved) {
  option_keys_.clear();
  if (!is_saved(saved)) return; // a checkpoint of a module alone: the entries are reported as missing
  c10::NoGradGuard no_grad;
  check_same_type(saved);
  if (flattened_ != is_flattened(saved)) {
    remove_options(state);
    flattened_ = !flattened_;
    add_options(state);
  }
  if (!flattened_) check_same_groups(saved);
  option_keys_ = option_keys(saved);
  for (const auto& group : groups_) {
    for (const auto& parameter : group) fit_parameter(parameter, state, saved);
  }
}

void OptimizerBinding::restore_parameter(const NamedParameter& parameter, const StateDict& state) const {
  const auto entry_of = [&](const std::string& field) { return state_name(parameter.name, field); };
  const bool any = std::any_of(fields_.state.tensors.begin(), fields_.state.tensors.end(),
                               [&](const auto& f) { return state.contains(entry_of(f.name)); }) ||
                   (fields_.state.step && state.contains(entry_of("step")));
  auto& states = optimizer_.state();
  auto* key = parameter.tensor.unsafeGetTensorImpl();
  if (!any) {
    states.erase(key);
    return;
  }
  if (!state_of(parameter.tensor)) states[key] = fields_.state.make_state();
  auto& kept = *state_of(parameter.tensor);
  for (const auto& field : fields_.state.tensors) {
    field.access(kept) = state.contains(entry_of(field.name)) ? state.tensor(entry_of(field.name)) : at::Tensor();
  }
  if (fields_.state.step && state.contains(entry_of("step"))) fields_.state.step(kept) = state.value<int64_t>(entry_of("step"));
}

void OptimizerBinding::after_load(const StateDict& state) {
  for (size_t g = 0; g < option_keys_.size(); ++g) {
    auto& options = optimizer_.param_groups()[g].options();
    for (const auto& option : fields_.options) {
      if (!option_keys_[g].empty()) option.set(options, state.value(option_name(option_keys_[g], option.name)));
    }
    for (const auto& parameter : groups_[g]) restore_parameter(parameter, state);
  }
}

} // namespace

StateDict optimizer_state_dict(const torch::nn::Module& module, Optimizer& optimizer, bool flatten) {
  StateDict state;
  auto binding = std::make_shared<OptimizerBinding>(module, optimizer, flatten);
  binding->add_entries(state);
  state.bind(std::move(binding));
  return state;
}

} // namespace tessera
