#include <tessera/fsdp/model/sharded_module.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/fsdp/model/module_walk.h>

namespace tessera::internal {

using torch::nn::Module;

ShardedModule::ShardedModule(ShardingCall call) : call_(std::move(call)) {
  for (const auto& module : call_.modules) model_->claim(module.get(), ShardedModel::Claim::kHeld);
}

bool ShardedModule::holds(const Module* module) const {
  return std::any_of(call_.modules.begin(), call_.modules.end(), [&](const auto& each) { return each.get() == module; });
}

std::vector<const Module*> ShardedModule::modules() const {
  std::vector<const Module*> modules;
  for (const auto& each : call_.modules) modules.push_back(each.get());
  return modules;
}

std::vector<std::shared_ptr<const Module>> ShardedModule::living_modules() const {
  std::vector<std::shared_ptr<const Module>> modules;
  for (const auto& each : call_.modules) {
    if (auto module = each.lock()) modules.push_back(std::move(module));
  }
  return modules;
}

void ShardedModule::check_no_new_parameter() const {
  const auto is_new = [&](const at::Tensor& parameter) {
    return parameter.requires_grad() && !dtensor_meta(parameter) && !ignores(parameter);
  };
  for (const auto top = root(); const auto& module : top->living_modules()) {
    if (!any_parameter(*module, is_new)) continue;
    for (const auto& item : module->named_parameters()) {
      TORCH_CHECK(!is_new(item.value()), "the parameter ", item.key(), " of ", module->name(),
                  " was registered after fully_shard, and its gradients would differ between the ranks: register it first, call "
                  "fully_shard on its module as well, or set requires_grad_(false). tessera::reshard_parameters shards what "
                  "was added");
    }
  }
}

/// Whether a `tessera::call` of this module or of one above it does so, at its end.
bool ShardedModule::casts_outputs_to(at::ScalarType dtype) const {
  for (const auto* at = this; at; at = at->parent_.get()) {
    if (at->is_called() && at->call_.options.mixed_precision.output_dtype == dtype) return true;
  }
  return false;
}

std::optional<at::ScalarType> ShardedModule::boundary_dtype() {
  const auto& policy = call_.options.mixed_precision;
  if (!policy.param_dtype || !policy.cast_forward_inputs) return std::nullopt;
  bool has_any = false;
  for (const auto& group : groups()) {
    for (const auto& parameter : group->parameters()) {
      if (parameter.forward.dtype != at::kFloat) return policy.param_dtype;
      has_any = true;
    }
  }
  return has_any ? at::kFloat : policy.param_dtype;
}

void ShardedModule::check_boundary() const {
  const auto* at = this;
  while (true) { // and those above that have no parameters of their own, of which nothing else tells
    const auto& dtype = at->call_.options.mixed_precision.output_dtype;
    if (dtype && !at->casts_outputs_to(*dtype) && !std::exchange(model_->warned_of_boundary, true) &&
        call_.roles.is_first_rank()) {
      TORCH_WARN("the policy of ", at->label(), " has the output_dtype ", *dtype,
                 ", but its parameters are read outside of tessera::call, and nothing casts what a forward returns that is "
                 "called directly. Call tessera::call(module, inputs...), or cast the outputs and leave output_dtype unset. "
                 "(This warning comes once a model, from one rank.)");
    }
    at = at->parent_.get();
    if (!at || at->group()) return;
  }
}

void ShardedModule::note_rounding(const std::string& name, at::ScalarType from, at::ScalarType to) const {
  if (std::exchange(model_->warned_of_rounding, true) || !call_.roles.is_first_rank()) return;
  TORCH_WARN(name, " in a tessera::call of ", label(), " has an activation in ", from, " beside a parameter in ", to,
             ", and computes in ", to, ", where FSDP2 would compute in ", from, ". Cast the activation to ", to,
             " to agree with both, keep the parameter in fp32 with keep_in_fp32, or set cast_forward_inputs = false and cast by "
             "hand. (This warning comes once a model, from one rank.)");
}

void ShardedModule::adopt(const std::shared_ptr<ShardedModule>& child, std::vector<Place> places) {
  child->parent_ = shared_from_this();
  children_.push_back({child, child->call_, places});
  child->places_ = std::move(places);
  model_->take(*child->model_);
}

void ShardedModule::keep_beside(const std::shared_ptr<ShardedModule>& state) {
  model_->take(*state->model_);
  state->model_ = model_;
  beside_.push_back(state);
}

std::shared_ptr<ShardedModule> ShardedModule::state_of(const Module* module) {
  if (holds(module)) return shared_from_this();
  const auto found = std::find_if(beside_.begin(), beside_.end(), [&](const auto& each) { return each->holds(module); });
  return found == beside_.end() ? nullptr : *found;
}

void ShardedModule::begin_forward() {
  if (const auto own = group(); own && !own->is_open()) forwards_.forget();
}

bool ShardedModule::end_forward(const Module* module) { return forwards_.end(module, call_.modules); }

std::vector<std::shared_ptr<ShardedModule>> ShardedModule::revive_below(const std::function<bool(const Module*)>& is_there) {
  std::vector<std::shared_ptr<ShardedModule>> revived;
  for (auto& child : children_) {
    const auto stayed = [&](const ModuleReference& each) { return each.get() && is_there(each.get()); };
    if (!child.state.expired() || !std::all_of(child.call.modules.begin(), child.call.modules.end(), stayed)) continue;
    revived.push_back(std::make_shared<ShardedModule>(child.call));
    revived.back()->parent_ = shared_from_this();
    revived.back()->model_ = model_;
    revived.back()->places_ = child.places;
    child.state = revived.back();
  }
  return revived;
}

void ShardedModule::set_groups(const std::vector<std::shared_ptr<ParameterGroup>>& groups) {
  groups_.clear();
  for (const auto& group : groups) {
    groups_.push_back({group, std::make_shared<Guarded<GroupGradients>>(*group)});
    groups_.back().gradients->unshared().settings.reshard_after_backward = !call_.roles.keeps_parameters();
  }
}

std::vector<std::shared_ptr<ParameterGroup>> ShardedModule::groups() const {
  std::vector<std::shared_ptr<ParameterGroup>> groups;
  for (const auto& each : groups_) {
    if (auto group = each.group.lock()) groups.push_back(std::move(group));
  }
  return groups;
}

std::vector<ModuleGroup>::const_iterator ShardedModule::first_group() const {
  return std::find_if(groups_.begin(), groups_.end(), [](const auto& each) { return !each.group.expired(); });
}

std::shared_ptr<ParameterGroup> ShardedModule::group() const {
  const auto first = first_group();
  return first == groups_.end() ? nullptr : first->group.lock();
}

std::string ShardedModule::path(size_t index) const {
  std::vector<std::string_view> parts;
  const auto* at = this;
  for (; at->parent_; at = at->parent_.get()) {
    const auto& place = at->places_[index];
    if (!place.path.empty()) parts.push_back(place.path);
    index = place.top;
  }
  const auto top = std::to_string(index);
  if (at->call_.modules.size() > 1) parts.push_back(top);
  std::reverse(parts.begin(), parts.end());
  return fmt::format("{}", fmt::join(parts, "."));
}

std::string ShardedModule::label() const {
  auto label = is_root() ? call_.class_name : path(0);
  // A second model's collectives must not be taken for those of the first.
  if (model_->number > 1) label += fmt::format(" of model {}", model_->number);
  return label;
}

std::vector<std::shared_ptr<ShardedModule>> ShardedModule::subtree() {
  std::vector<std::shared_ptr<ShardedModule>> states, open{shared_from_this()};
  while (!open.empty()) {
    states.push_back(std::move(open.back()));
    open.pop_back();
    const auto first_child = static_cast<std::ptrdiff_t>(open.size());
    for (const auto& each : states.back()->children_) {
      if (auto child = each.state.lock()) open.push_back(std::move(child));
    }
    std::reverse(open.begin() + first_child, open.end()); // the first child is next
  }
  return states;
}

std::vector<std::shared_ptr<ParameterGroup>> ShardedModule::subtree_groups() {
  std::vector<std::shared_ptr<ParameterGroup>> groups;
  for (const auto& state : subtree()) {
    for (auto& group : state->groups()) groups.push_back(std::move(group));
  }
  return groups;
}

bool ShardedModule::reshards_after_forward() const {
  if (call_.options.reshard_after_forward) return static_cast<bool>(*call_.options.reshard_after_forward);
  return !is_root() && !call_.roles.keeps_parameters();
}

/// Adds its groups to `all`: one without parameters if there is none, for those below to be below it.
void ShardedModule::enter(Schedule& schedule, std::vector<ScheduledGroup>& all) {
  std::erase_if(groups_, [](const auto& each) { return each.group.expired(); });
  number_ = all.size();
  for (const auto& [weak, gradients] : groups_) {
    const auto group = weak.lock();
    if (!group) continue;
    const bool joins = group->part.is_beside && all.size() > number_;
    group->attach(joins ? number_ : all.size(), schedule.resources());
    if (joins) {
      all[number_].beside.push_back({weak, gradients});
    } else {
      all.push_back({weak, gradients, prefetch_settings_, {}});
    }
  }
  if (all.size() == number_) all.push_back({{}, nullptr, nullptr, {}});
  const ModuleNumbers numbers{number_, all.size()};
  for (size_t each = number_; each < numbers.end; ++each) all[each].place = {numbers, numbers.end};
}

void ShardedModule::attach(const std::shared_ptr<Schedule>& schedule) {
  model_->root = weak_from_this();
  model_->schedule = schedule;
  const auto states = subtree();
  std::vector<ScheduledGroup> groups;
  for (const auto& state : states) {
    state->model_ = model_;
    for (const auto& beside : state->beside_) beside->model_ = model_;
    state->enter(*schedule, groups);
  }
  for (size_t i = states.size(); --i > 0;) {
    auto& above = groups[states[i]->parent_->number_].place;
    above.end = std::max(above.end, groups[states[i]->number_].place.end);
  }
  schedule->set_groups(std::move(groups));
  note_names();
}

void ShardedModule::note_names() {
  auto& names = model_->settled_names;
  names.clear();
  for (const auto& group : subtree_groups()) {
    for (size_t i = 0; i < group->parameters().size(); ++i) names.push_back(group->full_name(i));
  }
}

std::shared_ptr<ShardedModule> find_state(const Module& module) {
  std::shared_ptr<ShardedModule> found;
  any_parameter(module, [&](const at::Tensor& parameter) {
    const auto* meta = parameter_meta(parameter);
    for (auto* at = meta ? &state_of_group(*meta->group) : nullptr; at && !found; at = at->parent().get())
      found = at->state_of(&module);
    return found != nullptr;
  });
  return found;
}

} // namespace tessera::internal
