#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <tessera/checkpoint/bytes/json.h>
#include <tessera/checkpoint/state/optimizer_state.h>
#include <tessera/dtensor/api.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/optim/optimizer_class.h>
#include <tessera/optim/parts/stepped.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <limits>
#include <unordered_map>
#include <unordered_set>

namespace tessera::internal {

namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamState;

// As in a new state, what was saved in its parameter's dtype has the one of the parameter here. A number beside it, such as a
// step, keeps its own.
at::ScalarType dtype_for(const TensorField& field, const SavedState::Tensor& saved, const SavedState::Tensor* saved_parameter,
                         const at::Tensor& parameter) {
  const bool is_number = field.layout != StateLayout::kAsParameter && saved.sizes.empty();
  const bool follows = !is_number && saved_parameter && saved.dtype == saved_parameter->dtype;
  return follows ? parameter.scalar_type() : saved.dtype;
}

// A zero tensor laid out beside `parameter` as the field says.
at::Tensor zeros_for(const TensorField& field, const at::Tensor& parameter, const SavedState::Tensor& saved,
                     const std::string& name) {
  if (field.layout == StateLayout::kAsParameter) return zeros_as(parameter, saved.dtype);
  if (field.layout == StateLayout::kReplicated) return replicated_zeros(parameter, saved.sizes, saved.dtype);
  if (field.layout == StateLayout::kByRank) return by_rank_zeros(parameter, saved.sizes, saved.dtype, "state dict: " + name);
  const auto* meta = dtensor_meta(parameter);
  return at::zeros(saved.sizes, at::TensorOptions(saved.dtype).device(meta ? meta->spec->mesh().device() : parameter.device()));
}

void check_layout(const std::string& name, const TensorField& field, const at::Tensor& parameter, const at::Tensor& kept) {
  TORCH_CHECK(kept.defined(), "state dict: ", name, " is undefined");
  const bool is_plain = dtensor_meta(kept) == nullptr;
  if (field.layout == StateLayout::kPlain)
    TORCH_CHECK(is_plain, "state dict: ", name, " is a DTensor, and was registered as StateLayout::kPlain");
  if (field.layout != StateLayout::kAsParameter) return;
  TORCH_CHECK(kept.sizes() == parameter.sizes(), "state dict: ", name, " has shape ", kept.sizes(), ", and its parameter ",
              parameter.sizes(), ": register it as StateLayout::kReplicated or kPlain");
  TORCH_CHECK(is_plain == (dtensor_meta(parameter) == nullptr), "state dict: ", name, " is a ",
              is_plain ? "plain tensor and its parameter is sharded: the optimizer took a step before it was"
                       : "DTensor and its parameter is a plain tensor");
}

constexpr auto kOtherGroupsHint =
    "; a state that was saved with StateDictOptions::flatten_optimizer_state_dict fits other groups, and any other is loaded "
    "before add_param_group";
constexpr auto kRenameHint = ". Of a renamed parameter, LoadOptions::rename returns the name in the checkpoint";

// The parameters of an optimizer under the names that a module gives them. One that is listed twice, and so steps twice, has one
// state: it is where it is listed first.
struct NamedParameter {
  std::string name;
  at::Tensor tensor;
};
using NamedGroups = std::vector<std::vector<NamedParameter>>;

NamedGroups name_groups(const torch::nn::Module& module, const Optimizer& optimizer, const std::string& prefix) {
  std::unordered_map<const void*, std::string> names;
  for (const auto& parameter : module.named_parameters())
    names.emplace(parameter.value().unsafeGetTensorImpl(), prefix + parameter.key());
  std::unordered_set<const void*> listed;
  NamedGroups groups;
  for (const auto& group : optimizer.param_groups()) {
    groups.emplace_back();
    for (const auto& parameter : group.params()) {
      const auto found = names.find(parameter.unsafeGetTensorImpl());
      TORCH_CHECK(found != names.end(), "state dict: parameter ", groups.back().size(), " of the optimizer's group ",
                  groups.size() - 1, ", of shape ", parameter.sizes(),
                  ", is no parameter of the module; of an optimizer over several models, register these in one "
                  "module, whose state is saved");
      if (listed.insert(parameter.unsafeGetTensorImpl()).second) groups.back().push_back({found->second, parameter});
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

// The names of an optimizer's entries in a state dict.
struct EntryNames {
  explicit EntryNames(const std::string& optimizer) : root(optimizer.empty() ? "optimizer." : "optimizer." + optimizer + ".") {}
  std::string own(const std::string& field) const { return root + field; }
  std::string state(const std::string& parameter, const std::string& field) const {
    return root + "state." + parameter + "." + field;
  }
  // The tensor of a field, or the one with this number of its list.
  std::string tensor(const std::string& parameter, const TensorField& field, size_t number) const {
    return state(parameter, field.is_list ? field.name + "." + std::to_string(number) : field.name);
  }
  std::string option(const std::string& group_or_parameter, const std::string& field) const {
    return root + "param_groups." + group_or_parameter + "." + field;
  }
  std::string option(size_t group, const std::string& field) const { return option(std::to_string(group), field); }

  std::string root;
};

class OptimizerBinding : public StateBinding {
 public:
  // Groups of two modules would have the same numbers: with a prefix the options are named by parameter.
  OptimizerBinding(const torch::nn::Module& module, const NamedOptimizer& named, const StateDictOptions& options)
      : optimizer_(named.optimizer),
        class_(class_of(named.optimizer)),
        names_(named.name),
        groups_(name_groups(module, named.optimizer, options.prefix)),
        flattened_(options.flatten_optimizer_state_dict || !options.prefix.empty()) {}

  void add_entries(StateDict& state) const;
  void before_load(StateDict& state, const SavedState& saved) override;
  void after_load(const StateDict& state) override;
  std::string prefix() const override { return names_.root; }
  NamedByParameters named_by_parameters() const override {
    return {{names_.own("state."), names_.own("param_groups.")}, parameter_order()};
  }

 private:
  OptimizerParamState* state_of(const at::Tensor& parameter) const {
    const auto& states = optimizer_.state();
    const auto found = states.find(parameter.unsafeGetTensorImpl());
    return found == states.end() ? nullptr : found->second.get();
  }

  bool is_saved(const SavedState& saved) const { return saved.values.count(names_.own("type")) > 0; }
  // The names of a group's parameters are there exactly when the options are named by group.
  bool is_flattened(const SavedState& saved) const { return saved.values.count(names_.option(0, "params")) == 0; }
  std::vector<std::string> parameter_order() const;
  StateDict options_state(bool flattened) const;
  void check_same_type(const SavedState& saved) const;
  void check_same_order(const SavedState& saved) const;
  void check_same_groups(const SavedState& saved) const;
  void check_same_options(const SavedState& saved, size_t group, const std::string& first, const std::string& second) const;
  std::vector<std::string> option_keys(const SavedState& saved) const;
  // How many tensors of a field `holds` knows by name.
  template <typename Holds>
  size_t count_tensors(const NamedParameter& parameter, const TensorField& field, const Holds& holds) const {
    const size_t most = field.is_list ? std::numeric_limits<size_t>::max() : 1;
    size_t count = 0;
    while (count < most && holds(names_.tensor(parameter.name, field, count))) ++count;
    return count;
  }
  size_t count_tensors(const NamedParameter& parameter, const TensorField& field, const StateDict& state) const {
    return count_tensors(parameter, field, [&](const std::string& name) { return state.contains(name); });
  }
  size_t count_saved(const NamedParameter& parameter, const TensorField& field, const SavedState& saved) const {
    return count_tensors(parameter, field, [&](const std::string& name) { return saved.tensors.count(name) > 0; });
  }
  void refresh_options(StateDict& state) const;
  bool is_known(const NamedParameter& parameter, const SavedState& saved) const;
  std::unordered_set<std::string> unfit(const NamedParameter& parameter, const StateDict& state, const SavedState& saved) const;
  void erase_unfit(StateDict& state, const SavedState& saved);
  void fit_parameter(const NamedParameter& parameter, StateDict& state, const SavedState& saved) const;
  void restore_parameter(const NamedParameter& parameter, const StateDict& state) const;

  Optimizer& optimizer_;
  const OptimizerClass& class_;
  const EntryNames names_;
  NamedGroups groups_;
  bool flattened_;                          // the options are named by parameter in the state dict
  bool loads_flattened_ = false;            // and in the checkpoint that is loaded
  bool loads_ = false;                      // from a checkpoint that holds this optimizer
  std::vector<std::string> option_keys_;    // of each group, while such a checkpoint is loaded
  std::unordered_set<std::string> unknown_; // parameters that its optimizer did not have
};

std::vector<std::string> OptimizerBinding::parameter_order() const {
  std::vector<std::string> order;
  for (const auto& group : groups_) {
    for (const auto& parameter : group) order.push_back(parameter.name);
  }
  return order;
}

StateDict OptimizerBinding::options_state(bool flattened) const {
  StateDict state;
  for (size_t g = 0; g < groups_.size(); ++g) {
    auto& options = optimizer_.param_groups()[g].options();
    for (const auto& option : class_.options) {
      const auto value = option.get(options);
      if (!flattened) state.set(names_.option(g, option.name), value);
      for (const auto& parameter : groups_[g]) {
        if (flattened) state.set(names_.option(parameter.name, option.name), value);
      }
    }
    if (!flattened) state.set(names_.option(g, "params"), StateValue(names_of(groups_[g])));
  }
  return state;
}

void OptimizerBinding::add_entries(StateDict& state) const {
  state.set(names_.own("type"), StateValue(class_.name));
  for (const auto& value : class_.own) state.set(names_.own(value.name), value.get(optimizer_));
  if (class_.flattens_parameters) state.set(names_.own("parameters"), StateValue(parameter_order()));
  state.merge(options_state(flattened_));
  for (const auto& group : groups_) {
    for (const auto& [name, parameter] : group) {
      auto* kept = state_of(parameter);
      if (!kept) continue;
      for (const auto& field : class_.tensors) {
        const auto tensors = field.get(*kept);
        for (size_t i = 0; i < tensors.size(); ++i) {
          const auto entry = names_.tensor(name, field, i);
          check_layout(entry, field, parameter, tensors[i]);
          state.add(entry, tensors[i]);
        }
      }
      for (const auto& value : class_.values) state.set(names_.state(name, value.name), value.get(*kept));
    }
  }
}

void OptimizerBinding::check_same_type(const SavedState& saved) const {
  const auto* type = std::get_if<std::string>(&saved.values.at(names_.own("type")));
  TORCH_CHECK(type && *type == class_.name, "the checkpoint holds the state of another optimizer than ", class_.name, ": ",
              type ? *type : "?", ". Build that one, or load the model alone: state_dict(model), with allow_unused");
}

// Of a state that is one vector over all parameters, no name says which element belongs to which.
void OptimizerBinding::check_same_order(const SavedState& saved) const {
  const auto found = saved.values.find(names_.own("parameters"));
  if (!class_.flattens_parameters || found == saved.values.end()) return; // reported as missing
  const auto* there = std::get_if<std::vector<std::string>>(&found->second);
  const auto here = parameter_order();
  TORCH_CHECK(there && there->size() == here.size(), "the checkpoint's ", class_.name, " has ", there ? there->size() : 0,
              " parameters, and here are ", here.size(), ": its state fits the same ones alone");
  const auto [a, b] = std::mismatch(there->begin(), there->end(), here.begin());
  TORCH_CHECK(a == there->end(), "the checkpoint's ", class_.name, " lists its parameters in another order than here: \"", *a,
              "\" where \"", *b, "\" is");
}

void OptimizerBinding::check_same_options(const SavedState& saved, size_t group, const std::string& first,
                                          const std::string& second) const {
  for (const auto& option : class_.options) {
    const auto a = saved.values.find(names_.option(first, option.name)),
               b = saved.values.find(names_.option(second, option.name));
    if (a == saved.values.end() || b == saved.values.end()) continue; // reported as missing
    TORCH_CHECK(is_same(a->second, b->second), "parameter group ", group, " has one ", option.name,
                ", and the checkpoint holds different ones for \"", first, "\" and \"", second, "\"");
  }
}

// The name under which each group's options are saved: its number, or the first of its parameters that has been saved.
std::vector<std::string> OptimizerBinding::option_keys(const SavedState& saved) const {
  std::vector<std::string> keys;
  for (size_t g = 0; g < groups_.size(); ++g) {
    keys.push_back(loads_flattened_ ? "" : std::to_string(g));
    if (!loads_flattened_ || class_.options.empty()) continue;
    for (const auto& [name, parameter] : groups_[g]) {
      if (saved.values.count(names_.option(name, class_.options[0].name)) == 0) continue; // reported as missing
      if (keys.back().empty()) keys.back() = name;
      check_same_options(saved, g, keys.back(), name);
    }
  }
  return keys;
}

void OptimizerBinding::check_same_groups(const SavedState& saved) const {
  size_t groups = 0;
  while (saved.values.count(names_.option(groups, "params")) > 0) ++groups;
  TORCH_CHECK(groups == groups_.size(), "the checkpoint holds an optimizer with ", groups, " parameter groups, and here are ",
              groups_.size(), kOtherGroupsHint);
  for (size_t g = 0; g < groups; ++g) {
    const auto* names = std::get_if<std::vector<std::string>>(&saved.values.at(names_.option(g, "params")));
    auto here = names_of(groups_[g]), there = names ? *names : std::vector<std::string>{};
    std::sort(here.begin(), here.end());
    std::sort(there.begin(), there.end());
    std::vector<std::string> differing, gone;
    std::set_symmetric_difference(here.begin(), here.end(), there.begin(), there.end(), std::back_inserter(differing));
    std::set_difference(there.begin(), there.end(), here.begin(), here.end(), std::back_inserter(gone));
    const bool may_be_renamed = !gone.empty() && gone.size() < differing.size();
    TORCH_CHECK(differing.empty(), "parameter group ", g, " of the checkpoint's optimizer holds other parameters than here; ",
                differing.size(), " differ, the first is \"", differing.front(), "\"",
                may_be_renamed ? c10::str(", only the checkpoint has \"", gone.front(), "\"", kRenameHint) : "",
                kOtherGroupsHint);
  }
}

// Whether the checkpoint's optimizer had the parameter, be it without a state. By group it has the same ones, see
// `check_same_groups`.
bool OptimizerBinding::is_known(const NamedParameter& parameter, const SavedState& saved) const {
  const auto is_saved = [&](const std::string& name) { return saved.values.count(name) > 0; };
  return !loads_flattened_ || class_.flattens_parameters || std::ranges::any_of(class_.options, [&](const auto& option) {
    return is_saved(names_.option(parameter.name, option.name));
  }) || std::ranges::any_of(class_.values, [&](const auto& value) {
    return is_saved(names_.state(parameter.name, value.name));
  }) || std::ranges::any_of(class_.tensors, [&](const auto& field) { return count_saved(parameter, field, saved) > 0; });
}

// Names the entries of a parameter that the checkpoint does not hold. What has the parameter's shape is loaded in place; other
// tensors may have another shape in the checkpoint.
std::unordered_set<std::string> OptimizerBinding::unfit(const NamedParameter& parameter, const StateDict& state,
                                                        const SavedState& saved) const {
  std::unordered_set<std::string> names;
  for (const auto& field : class_.tensors) {
    const size_t here = count_tensors(parameter, field, state), there = count_saved(parameter, field, saved);
    const size_t kept = field.layout == StateLayout::kAsParameter ? std::min(here, there) : 0;
    for (size_t i = kept; i < here; ++i) names.insert(names_.tensor(parameter.name, field, i));
  }
  for (const auto& value : class_.values) {
    const auto name = names_.state(parameter.name, value.name);
    if (saved.values.count(name) == 0) names.insert(name);
  }
  return names;
}

// The state of a parameter that the checkpoint's optimizer did not have stays, and its entries are reported as missing.
void OptimizerBinding::erase_unfit(StateDict& state, const SavedState& saved) {
  std::unordered_set<std::string> names;
  unknown_.clear();
  for (const auto& group : groups_) {
    for (const auto& parameter : group) {
      if (is_known(parameter, saved)) {
        names.merge(unfit(parameter, state, saved));
      } else {
        unknown_.insert(parameter.name);
      }
    }
  }
  state.erase_if([&](const auto& entry) { return names.count(entry.name) > 0; });
}

// Adds entries for what the checkpoint holds.
void OptimizerBinding::fit_parameter(const NamedParameter& parameter, StateDict& state, const SavedState& saved) const {
  const auto found = saved.tensors.find(parameter.name);
  const auto* saved_parameter = found == saved.tensors.end() ? nullptr : &found->second;
  for (const auto& field : class_.tensors) {
    const size_t there = count_saved(parameter, field, saved);
    for (size_t i = count_tensors(parameter, field, state); i < there; ++i) {
      const auto name = names_.tensor(parameter.name, field, i);
      auto tensor = saved.tensors.at(name);
      tensor.dtype = dtype_for(field, tensor, saved_parameter, parameter.tensor);
      state.add(name, zeros_for(field, parameter.tensor, tensor, name));
    }
  }
  if (class_.values.empty()) return;
  const auto fresh = class_.make_state();
  for (const auto& value : class_.values) {
    const auto name = names_.state(parameter.name, value.name);
    if (saved.values.count(name) > 0 && !state.contains(name)) state.set(name, value.get(*fresh));
  }
}

// Those of now, which stay where a load leaves one out, under the names that the checkpoint has.
void OptimizerBinding::refresh_options(StateDict& state) const {
  for (const auto& value : class_.own) {
    if (state.contains(names_.own(value.name))) state.set(names_.own(value.name), value.get(optimizer_));
  }
  const auto before = options_state(flattened_);
  if (flattened_ == loads_flattened_) {
    for (const auto& [name, value, aliases] : before.entries()) {
      if (state.contains(name)) state.set(name, std::get<StateValue>(value));
    }
    return;
  }
  state.erase_if([&](const auto& entry) { return before.contains(entry.name); });
  state.merge(options_state(loads_flattened_));
}

void OptimizerBinding::before_load(StateDict& state, const SavedState& saved) {
  loads_ = is_saved(saved);
  if (!loads_) return; // a checkpoint of a module alone: the entries are reported as missing
  c10::NoGradGuard no_grad;
  check_same_type(saved);
  check_same_order(saved);
  loads_flattened_ = is_flattened(saved);
  refresh_options(state);
  if (!loads_flattened_) check_same_groups(saved);
  option_keys_ = option_keys(saved);
  erase_unfit(state, saved);
  for (const auto& group : groups_) {
    for (const auto& parameter : group) fit_parameter(parameter, state, saved);
  }
}

void OptimizerBinding::restore_parameter(const NamedParameter& parameter, const StateDict& state) const {
  const auto is_loaded = [&](const auto& value) { return state.contains(names_.state(parameter.name, value.name)); };
  const bool any = std::any_of(class_.tensors.begin(), class_.tensors.end(),
                               [&](const auto& field) { return count_tensors(parameter, field, state) > 0; }) ||
                   std::any_of(class_.values.begin(), class_.values.end(), is_loaded);
  auto& states = optimizer_.state();
  auto* key = parameter.tensor.unsafeGetTensorImpl();
  if (!any) {
    states.erase(key);
    return;
  }
  if (!state_of(parameter.tensor)) states[key] = class_.make_state();
  auto& kept = *state_of(parameter.tensor);
  for (const auto& field : class_.tensors) {
    std::vector<at::Tensor> tensors(count_tensors(parameter, field, state));
    for (size_t i = 0; i < tensors.size(); ++i) tensors[i] = state.tensor(names_.tensor(parameter.name, field, i));
    field.set(kept, tensors);
  }
  for (const auto& value : class_.values) {
    if (is_loaded(value)) value.set(kept, state.value(names_.state(parameter.name, value.name)));
  }
}

void OptimizerBinding::after_load(const StateDict& state) {
  if (!loads_) return;
  flattened_ = loads_flattened_;
  for (const auto& value : class_.own) value.set(optimizer_, state.value(names_.own(value.name)));
  for (size_t g = 0; g < groups_.size(); ++g) {
    auto& options = optimizer_.param_groups()[g].options();
    for (const auto& option : class_.options) {
      if (!option_keys_[g].empty()) option.set(options, state.value(names_.option(option_keys_[g], option.name)));
    }
    for (const auto& parameter : groups_[g]) {
      if (unknown_.count(parameter.name) == 0) restore_parameter(parameter, state);
    }
  }
}

} // namespace

StateDict optimizer_state_dict(const torch::nn::Module& module, const NamedOptimizer& optimizer,
                               const StateDictOptions& options) {
  StateDict state;
  auto binding = std::make_shared<OptimizerBinding>(module, optimizer, options);
  binding->add_entries(state);
  state.bind(std::move(binding));
  return state;
}

} // namespace tessera::internal
