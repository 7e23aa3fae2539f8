#include <tessera/fsdp/setup/model_inventory.h>

#include <absl/container/flat_hash_set.h>

namespace tessera::internal {

using torch::nn::Module;

ModelInventory::ModelInventory(Module& module, const std::vector<at::Tensor>& ignored, std::optional<at::ScalarType> dtype)
    : census_(take_census({&module}, ignored)) {
  TORCH_CHECK_VALUE(!census_.roots.empty(), "reshard_parameters: the module ", module.name(),
                    " is not sharded: call fully_shard on it, also where all parameters that it sharded were replaced");
  TORCH_CHECK_VALUE(census_.roots.size() == 1, "reshard_parameters: the module ", module.name(), " has ", census_.roots.size(),
                    " models below it that were sharded apart, so that none of them is the whole: call it on each module that "
                    "has one of them alone, and shard what is added to a model by reshard_parameters and not by fully_shard");
  root_ = census_.roots[0];
  check_root(module);
  list_states();
  absl::flat_hash_set<const c10::TensorImpl*> ignored_now, seen;
  for (const auto& each : census_.ignored) ignored_now.insert(each.tensor.unsafeGetTensorImpl());
  for (const auto& visit : census_.walk.visits()) { // the order of both lists of the census together
    for (const auto& item : Registry::parameters(*visit.module)) {
      const auto& parameter = item.value();
      if (!parameter.defined() || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
      const bool is_left_out = root_->ignores(parameter) || ignored_now.contains(parameter.unsafeGetTensorImpl());
      if (!is_left_out) enter({parameter, &visit, item.key()}, dtype);
    }
  }
  note_removed();
}

void ModelInventory::check_root(const Module& module) const {
  for (const auto* top : root_->modules()) {
    TORCH_CHECK_VALUE(top == &module || census_.walk.is_below(top), "reshard_parameters: the module ", module.name(),
                      " is a part of the model ", root_->label(), ": call it on the model's root, by all ranks");
  }
}

void ModelInventory::list_states() {
  const auto is_there = [&](const Module* below) { return census_.walk.is_below(below); };
  for (const auto& state : root_->subtree()) {
    for (auto& revived : state->revive_below(is_there)) revived_.push_back(std::move(revived));
  }
  for (const auto& state : root_->subtree()) {
    positions_.emplace(state.get(), inventories_.size());
    auto& inventory = inventories_.emplace_back();
    inventory.state = state;
    inventory.groups = state->groups();
    const auto modules = state->modules();
    for (size_t top = 0; top < modules.size(); ++top) {
      if (modules[top]) held_.emplace(modules[top], std::pair(state.get(), top));
    }
  }
}

ModelInventory::Above ModelInventory::above(const Registered& item, const ShardedModule* state) const {
  const auto& walk = census_.walk;
  for (const auto* at = item.visit;; at = &walk.visits()[at->above]) {
    const auto found = held_.find(at->module);
    if (found != held_.end() && (!state || found->second.first == state)) {
      const auto prefix = walk.place_of(*at).path, path = walk.place_of(*item.visit, item.key).path;
      return {found->second.first, found->second.second, prefix.empty() ? path : path.substr(prefix.size() + 1)};
    }
    if (at->is_top()) return {};
  }
}

void ModelInventory::enter(const Registered& item, std::optional<at::ScalarType> dtype) {
  const auto* meta = parameter_meta(item.tensor);
  PresentParameter present{.tensor = item.tensor, .dtype = item.tensor.scalar_type()};
  if (dtype && item.tensor.is_floating_point()) present.dtype = *dtype;
  auto* state = meta ? &state_of_group(*meta->group) : nullptr;
  const auto place = above(item, state);
  if (meta) {
    present.before = &meta->group->parameters()[meta->index];
    present.place = place.state ? Place{place.top, place.path} : present.before->origin.place;
  } else {
    TORCH_CHECK_VALUE(place.state, "reshard_parameters: no sharded module is above the parameter ", census_.name_of(item),
                      ": call fully_shard on its module");
    state = place.state;
    present.place = {place.top, place.path};
  }
  const auto path = state->path(present.place.top);
  present.name = path.empty() ? present.place.path : path + "." + present.place.path;
  auto& inventory = inventories_[positions_.at(state)];
  present.mesh = meta ? inventory.mesh_of(*meta->group) : state->roles().mesh();
  inventory.present.push_back(std::move(present));
}

void ModelInventory::note_removed() {
  absl::flat_hash_set<std::string> alive;
  for (auto& inventory : inventories_) {
    absl::flat_hash_set<const ShardedParameter*> kept;
    for (const auto& each : inventory.present) kept.insert(each.before);
    for (const auto& group : inventory.groups) {
      for (size_t i = 0; i < group->parameters().size(); ++i) {
        alive.insert(group->full_name(i));
        if (!kept.contains(&group->parameters()[i]))
          inventory.removed.push_back({group->full_name(i), inventory.mesh_of(*group)});
      }
    }
  }
  for (const auto& name : root_->model().settled_names) {
    if (!alive.contains(name)) gone_.push_back(name);
  }
}

bool ModelInventory::has_chosen_meshes() const {
  return std::any_of(inventories_.begin(), inventories_.end(), [](const ModuleInventory& inventory) {
    return std::any_of(inventory.groups.begin(), inventory.groups.end(),
                       [&](const auto& group) { return !(inventory.mesh_of(*group) == inventory.state->roles().mesh()); });
  });
}

void ModelInventory::claim_new_modules() {
  for (const auto& visit : census_.walk.visits()) {
    const auto* at = &visit;
    while (!at->is_top() && !held_.contains(at->module)) at = &census_.walk.visits()[at->above];
    if (held_.contains(at->module)) root_->model().claim(visit.module, ShardedModel::Claim::kBelow);
  }
}

std::vector<Module*> ModelInventory::modules_of(const ShardedModule& state) const {
  std::vector<Module*> modules;
  for (const auto* module : state.modules()) {
    if (held_.contains(module) && census_.walk.contains(module)) modules.push_back(census_.walk.visit_of(module).module);
  }
  return modules;
}

} // namespace tessera::internal
