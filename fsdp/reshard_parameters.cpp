#include <tessera/fsdp/reshard_parameters.h>

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <absl/container/flat_hash_map.h>
#include <absl/container/flat_hash_set.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <memory>
#include <utility>

#include <tessera/collectives/error_text.h>
#include <tessera/dtensor/api.h>
#include <tessera/fsdp/gradient_hooks.h>
#include <tessera/fsdp/group_making.h>
#include <tessera/fsdp/initial_weights.h>
#include <tessera/fsdp/unsharded_dtypes.h>

namespace tessera {

namespace internal {

namespace {

using torch::nn::Module;
using StatePtr = std::shared_ptr<ShardedModule>;
using GroupPtr = std::shared_ptr<ParameterGroup>;

/// A parameter in the model as it is now.
struct Present {
  at::Tensor tensor;
  Place place;                              // among the modules of its state
  std::string name;                         // from the root
  const ShardedParameter* before = nullptr; // null for a new one
  at::ScalarType dtype = at::kFloat;        // from now on
};

/// A state with its parameters as they are now, in the order in which `fully_shard` would meet them.
struct Inventory {
  StatePtr state;
  std::vector<GroupPtr> groups; // as they are until now
  std::vector<Present> present;
  std::vector<at::ScalarType> read_dtypes; // of these, in forward from now on
  std::vector<std::string> removed;

  bool is_changed() const {
    return !removed.empty() || std::any_of(present.begin(), present.end(), [](const Present& each) {
      return !each.before || each.before->spec->dtype() != each.dtype;
    });
  }
};

/// A model and what belongs to whom in it.
class Model {
 public:
  Model(Module& module, const ReshardParametersOptions& options);

  std::vector<Inventory>& inventories() { return inventories_; }
  ShardedModule& root() { return *root_; }
  /// Parameters that went with all others of their group: nothing holds them.
  const std::vector<std::string>& gone() const { return gone_; }
  /// Modules below a sharded one cannot be sharded by themselves.
  void claim_new_modules();
  const Census& census() const { return census_; }
  /// The modules of a state that are still in the model.
  std::vector<Module*> modules_of(const ShardedModule& state) const;

 private:
  void check_root(const Module& module) const;
  void list_states();
  void enter(const Registered& item, const ReshardParametersOptions& options);
  void note_removed();
  /// The number and the path of a visit from the next module above that `state`, or if null any state, holds.
  struct Above {
    ShardedModule* state = nullptr;
    size_t top = 0;
    std::string path;
  };
  Above above(const Registered& item, const ShardedModule* state) const;

  Census census_;
  StatePtr root_;
  std::vector<StatePtr> revived_;
  std::vector<Inventory> inventories_;
  std::vector<std::string> gone_;
  absl::flat_hash_map<const ShardedModule*, size_t> positions_;
  absl::flat_hash_map<const Module*, std::pair<ShardedModule*, size_t>> held_;
};

Model::Model(Module& module, const ReshardParametersOptions& options) : census_(take_census({&module}, options.ignored_params)) {
  TORCH_CHECK_VALUE(!census_.roots.empty(), "reshard_parameters: the module ", module.name(),
                    " is not sharded: call fully_shard on it, also where all parameters that it sharded were replaced");
  TORCH_CHECK_VALUE(census_.roots.size() == 1, "reshard_parameters: the module ", module.name(), " has ", census_.roots.size(),
                    " models below it that were sharded apart, so that none of them is the whole: call it on each module that "
                    "has one of them alone, and shard what is added to a model by reshard_parameters and not by fully_shard");
  root_ = census_.roots[0];
  check_root(module);
  list_states();
  absl::flat_hash_set<const c10::TensorImpl*> seen;
  for (const auto& visit : census_.walk.visits()) { // the order of both lists of the census together
    for (const auto& item : Registry::parameters(*visit.module)) {
      const auto& parameter = item.value();
      if (!parameter.defined() || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
      const bool is_left_out =
          root_->ignores(parameter) ||
          std::any_of(census_.ignored.begin(), census_.ignored.end(), [&](auto& each) { return each.tensor.is_same(parameter); });
      if (!is_left_out) enter({parameter, &visit, item.key()}, options);
    }
  }
  note_removed();
}

void Model::check_root(const Module& module) const {
  for (const auto* top : root_->modules()) {
    TORCH_CHECK_VALUE(top == &module || census_.walk.is_below(top), "reshard_parameters: the module ", module.name(),
                      " is a part of the model ", root_->label(), ": call it on the model's root, by all ranks");
  }
}

void Model::list_states() {
  const auto is_there = [&](const Module* below) { return census_.walk.is_below(below); };
  for (const auto& state : root_->subtree()) {
    for (auto& revived : state->revive_below(is_there)) revived_.push_back(std::move(revived));
  }
  for (const auto& state : root_->subtree()) {
    if (&state->of_modules() != state.get()) continue; // a bucket
    positions_.emplace(state.get(), inventories_.size());
    auto& inventory = inventories_.emplace_back();
    inventory.state = state;
    for (const auto& part : state->parts()) {
      if (auto group = part->group()) inventory.groups.push_back(std::move(group));
    }
    const auto modules = state->modules();
    for (size_t top = 0; top < modules.size(); ++top) {
      if (modules[top]) held_.emplace(modules[top], std::pair(state.get(), top));
    }
  }
}

Model::Above Model::above(const Registered& item, const ShardedModule* state) const {
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

void Model::enter(const Registered& item, const ReshardParametersOptions& options) {
  const auto* meta = parameter_meta(item.tensor);
  Present present{item.tensor, {}, {}, nullptr, item.tensor.scalar_type()};
  if (options.dtype && item.tensor.is_floating_point()) present.dtype = *options.dtype;
  auto* state = meta ? &module_of(*meta->group).of_modules() : nullptr;
  const auto place = above(item, state);
  if (meta) {
    present.before = &meta->group->parameters()[meta->index];
    present.place = place.state ? Place{place.top, place.path} : Place{present.before->module, present.before->own_name};
  } else {
    TORCH_CHECK_VALUE(place.state, "reshard_parameters: no sharded module is above the parameter ", census_.name_of(item),
                      ": call fully_shard on its module");
    state = place.state;
    present.place = {place.top, place.path};
  }
  const auto path = state->path(present.place.top);
  present.name = path.empty() ? present.place.path : path + "." + present.place.path;
  inventories_[positions_.at(state)].present.push_back(std::move(present));
}

void Model::note_removed() {
  absl::flat_hash_set<std::string> alive;
  for (auto& inventory : inventories_) {
    absl::flat_hash_set<const ShardedParameter*> kept;
    for (const auto& each : inventory.present) kept.insert(each.before);
    for (const auto& group : inventory.groups) {
      for (size_t i = 0; i < group->parameters().size(); ++i) {
        alive.insert(group->full_name(i));
        if (!kept.contains(&group->parameters()[i])) inventory.removed.push_back(group->full_name(i));
      }
    }
  }
  for (const auto& name : root_->settled_names()) {
    if (!alive.contains(name)) gone_.push_back(name);
  }
}

void Model::claim_new_modules() {
  for (const auto& visit : census_.walk.visits()) {
    const auto* at = &visit;
    while (!at->is_top() && !held_.contains(at->module)) at = &census_.walk.visits()[at->above];
    if (held_.contains(at->module)) root_->add_below(visit.module);
  }
}

std::vector<Module*> Model::modules_of(const ShardedModule& state) const {
  std::vector<Module*> modules;
  for (const auto* module : state.modules()) {
    if (held_.contains(module) && census_.walk.contains(module)) modules.push_back(census_.walk.visit_of(module).module);
  }
  return modules;
}

void check_present(const Inventory& inventory) {
  for (const auto& each : inventory.present) {
    const auto check = [&](bool holds, const char* problem) {
      TORCH_CHECK(holds, "reshard_parameters: the parameter ", each.name, problem);
    };
    if (!each.before) {
      check_parameter(each.tensor, each.name, each.tensor);
      check(!each.tensor.is_meta(), " is on the meta device: give it values first");
    } else {
      check(each.before->leaf.defined(), " is on the meta device: call tessera::materialize first");
      check(!each.tensor.grad().defined(),
            " has a gradient, whose parts would lie elsewhere: take the step and call zero_grad first");
    }
  }
}

/// Before any change: a norm may be unable to mix them.
void choose_read_dtypes(const Model& model, Inventory& inventory, const std::optional<at::ScalarType>& dtype) {
  const auto& policy = inventory.state->options().mixed_precision;
  const ModuleWalk walk(model.modules_of(*inventory.state));
  std::vector<at::Tensor> tensors;
  for (const auto& each : inventory.present) tensors.push_back(each.tensor);
  auto& dtypes = inventory.read_dtypes;
  dtypes = unsharded_dtypes(walk, tensors, policy);
  for (size_t i = 0; i < dtypes.size(); ++i) {
    if (!policy.param_dtype) dtypes[i] = inventory.present[i].dtype;
  }
  check_norms(walk, tensors, dtypes, dtype);
}

/// Of one mesh: what all its ranks must have found alike, and the new parameters.
struct Findings {
  DeviceMesh mesh;
  std::string description;
  std::vector<at::Tensor> added;
  std::vector<std::string> names;
};

void describe(const Inventory& inventory, Findings& findings) {
  if (!inventory.is_changed()) return;
  findings.description += fmt::format("\nof {} removed [{}]", inventory.state->label(), fmt::join(inventory.removed, ", "));
  for (const auto& each : inventory.present) {
    findings.description += fmt::format("\n{} {} in {}", each.before ? "kept" : "new", each.name, c10::toString(each.dtype));
    if (each.before) continue;
    findings.added.push_back(each.tensor);
    findings.names.push_back(each.name);
  }
}

void agree(Model& model, const std::string& module) {
  const auto& root = model.root();
  std::vector<Findings> all{{root.axes().mesh(), fmt::format("\ngone [{}]", fmt::join(model.gone(), ", ")), {}, {}}};
  for (const auto& inventory : model.inventories()) {
    const auto& mesh = inventory.state->axes().mesh();
    auto found = std::find_if(all.begin(), all.end(), [&](const auto& each) { return each.mesh == mesh; });
    if (found == all.end()) found = all.insert(all.end(), {mesh, "", {}, {}});
    describe(inventory, *found);
  }
  for (const auto& [mesh, description, added, names] : all)
    agree_on_initial_weights(added, names, mesh, root.options().initial_weights, "reshard_parameters of " + module, description,
                             root.model_number);
}

/// The group, or groups, of a state anew.
class Remaking {
 public:
  Remaking(Inventory& inventory, std::shared_ptr<ModelResources> resources)
      : inventory_(inventory), resources_(std::move(resources)) {}

  /// The groups that take the place of the first one of before, of what `take` returned. Names of kept parameters that lie
  /// elsewhere are added to `moved`.
  std::vector<GroupPtr> run(const FreeParameters& free, std::vector<std::string>& moved) {
    const auto before = specs();
    std::vector<GroupPtr> made;
    for (const auto& group : inventory_.groups) retire_gradients(*group);
    if (!free.tensors.empty()) {
      const auto settings = settings_of();
      made = make_groups(inventory_.state, free, resources_, neighbours());
      for (const auto& part : inventory_.state->parts()) {
        if (part->group()) settings ? take_settings(part->gradients(), *settings) : take_settings_above(part->gradients());
      }
      for (const auto& group : made) {
        if (!inventory_.groups.empty()) group->axes() = inventory_.groups[0]->axes(); // with the program's own communicators
      }
    }
    for (const auto& group : inventory_.groups) {
      for (size_t i = 0; i < group->parameters().size(); ++i) group->release_parameter(i); // those that were removed
    }
    note_moved(before, moved);
    return made;
  }

  /// Gathers the kept ones, whole.
  FreeParameters take() const {
    FreeParameters free;
    for (const auto& each : inventory_.present) {
      const auto whole = each.before ? DTensor(each.tensor).full_tensor() : each.tensor.detach();
      free.tensors.push_back(each.tensor);
      free.places.push_back(each.place);
      free.placements.push_back(each.before ? each.before->chosen : std::nullopt);
      free.values.push_back(whole.to(each.dtype));
      const auto* meta = parameter_meta(each.tensor);
      free.extensions.push_back(meta ? meta->group->extended().extension_of(meta->index) : nullptr);
    }
    const auto is_null = [](const auto& extension) { return extension == nullptr; };
    if (std::all_of(free.extensions.begin(), free.extensions.end(), is_null)) free.extensions.clear();
    free.dtypes = inventory_.read_dtypes;
    return free;
  }

 private:
  std::vector<SpecPtr> specs() const {
    std::vector<SpecPtr> all;
    for (const auto& each : inventory_.present) all.push_back(each.before ? each.before->spec : nullptr);
    return all;
  }

  /// A copy, which the first group that is made would replace. Null for none.
  std::unique_ptr<GroupGradients> settings_of() const {
    if (inventory_.groups.empty()) return nullptr;
    auto settings = std::make_unique<GroupGradients>(*inventory_.groups[0]);
    take_settings(*settings, inventory_.state->gradients());
    return settings;
  }

  static void take_settings(GroupGradients& gradients, const GroupGradients& before) {
    gradients.take_settings(before);
    gradients.no_sync_scopes = before.no_sync_scopes;
  }

  /// For a module that had no group: what is set on the next one above that has one.
  void take_settings_above(GroupGradients& gradients) const {
    auto above = inventory_.state->parent();
    while (above && !above->group()) above = above->parent();
    if (!above) return;
    gradients.requires_sync = above->gradients().sync_setting();
    gradients.requires_all_reduce = above->gradients().all_reduce_setting();
    gradients.has_only_buffer = above->gradients().has_only_buffer;
  }

  CommunicatorPtr neighbours() const {
    if (!inventory_.groups.empty()) return inventory_.groups[0]->neighbours();
    const auto& state = *inventory_.state;
    return connect_neighbours(state.axes(), state.options().reshard_after_forward);
  }

  void note_moved(const std::vector<SpecPtr>& before, std::vector<std::string>& moved) const {
    for (size_t i = 0; i < before.size(); ++i) {
      const auto& present = inventory_.present[i];
      if (!present.before) continue;
      const auto* meta = parameter_meta(present.tensor);
      meta->group->parameters()[meta->index].original = present.before->original;
      if (meta->spec != before[i]) moved.push_back(present.name);
    }
  }

  Inventory& inventory_;
  std::shared_ptr<ModelResources> resources_;
};

/// Each buffer that has another dtype, and its values in this one.
std::vector<std::pair<at::Tensor, at::Tensor>> cast_buffers(const Census& census, std::optional<at::ScalarType> dtype) {
  std::vector<std::pair<at::Tensor, at::Tensor>> casts;
  for (const auto& [buffer, visit, key] : census.buffers) {
    if (dtype && buffer.defined() && buffer.is_floating_point() && buffer.scalar_type() != *dtype)
      casts.emplace_back(buffer, buffer.to(*dtype));
  }
  return casts;
}

using Replaced = absl::flat_hash_map<const ParameterGroup*, std::weak_ptr<ParameterGroup>>;

void replace_in_prefetch_lists(ShardedModule& root, const Replaced& replaced) {
  for (const auto& state : root.subtree()) {
    for (auto* list : {&state->prefetch_settings().in_forward, &state->prefetch_settings().in_backward}) {
      for (auto& weak : *list) {
        const auto found = replaced.find(weak.lock().get());
        if (found != replaced.end()) weak = found->second;
      }
      std::erase_if(*list, [](const auto& weak) { return weak.expired(); });
    }
  }
}

void remake(Model& model, std::vector<std::string>& moved) {
  auto& root = model.root();
  const auto old_schedule = root.schedule();
  const auto schedule = std::make_shared<Schedule>(root.axes().mesh().device());
  schedule->set_is_last_backward(old_schedule->is_last_backward());
  schedule->set_gradient_weights(old_schedule->gradient_weights());
  schedule->set_reporting(old_schedule->resources()->recorder != nullptr);
  Replaced replaced;
  bool has_changed = false;
  try {
    for (auto& inventory : model.inventories()) {
      for (const auto& group : inventory.groups) old_schedule->reshard(*group);
      if (!inventory.is_changed()) continue;
      Remaking remaking(inventory, schedule->resources());
      const auto free = remaking.take();
      has_changed = true;
      const auto made = remaking.run(free, moved);
      for (const auto& group : inventory.groups) replaced[group.get()] = made.empty() ? GroupPtr() : made[0];
    }
  } catch (...) { // some groups are new, and others are not
    if (has_changed)
      old_schedule->refuse("the model cannot be used any more, because reshard_parameters failed amid its changes: " +
                           error_text(std::current_exception()));
    throw;
  }
  replace_in_prefetch_lists(root, replaced); // while the old groups live
  for (auto& inventory : model.inventories()) inventory.groups.clear();
  root.settle(schedule);
}

/// Without those that are moved.
ReshardedParameters list_changes(Model& model) {
  ReshardedParameters changes{.added = {}, .removed = model.gone(), .moved = {}};
  for (const auto& inventory : model.inventories()) {
    for (const auto& each : inventory.present) {
      if (!each.before) changes.added.push_back(each.name);
    }
    changes.removed.insert(changes.removed.end(), inventory.removed.begin(), inventory.removed.end());
  }
  return changes;
}

/// The names of modules may have changed where nothing else did.
void rename(const Inventory& inventory) {
  for (const auto& each : inventory.present) {
    auto* before = const_cast<ShardedParameter*>(each.before);
    before->own_name = each.place.path;
    before->module = each.place.top;
  }
}

/// What is new also where each group stays as it is.
void change_around_groups(Model& model, const ReshardParametersOptions& options) {
  auto& root = model.root();
  for (const auto& inventory : model.inventories()) {
    if (!inventory.is_changed()) rename(inventory);
  }
  for (const auto& item : model.census().ignored) root.ignore(item.tensor);
  move_buffers(model.census().buffers, root.axes().mesh().device());
  model.claim_new_modules();
}

void check_reduced(const std::vector<Inventory>& inventories) {
  for (const auto& inventory : inventories) {
    for (const auto& part : inventory.state->parts()) {
      const auto group = part->group();
      TORCH_CHECK(!group || !part->gradients().is_unfinished(), "reshard_parameters: gradients of ", group->label(),
                  " wait for their reduction: run a synchronized backward, take the step and call zero_grad first");
    }
  }
}

} // namespace

} // namespace internal

ReshardedParameters reshard_parameters(torch::nn::Module& module, const ReshardParametersOptions& options) {
  using namespace internal; // NOLINT(google-build-using-namespace)
  TORCH_CHECK_VALUE(!c10::InferenceMode::is_enabled(), "reshard_parameters: called in InferenceMode; call it outside");
  TORCH_CHECK(torch::autograd::get_current_graph_task_id() < 0, "reshard_parameters: called inside a backward");
  TORCH_CHECK_VALUE(!options.dtype || at::isFloatingType(*options.dtype), "reshard_parameters: the dtype ", *options.dtype,
                    " is no floating-point one");
  const at::NoGradGuard no_grad;
  Model model(module, options);
  auto& root = model.root();
  auto& inventories = model.inventories();
  root.schedule()->forget_failed_backward();
  const bool is_changed = std::any_of(inventories.begin(), inventories.end(), [](const auto& each) { return each.is_changed(); });
  if (is_changed) check_reduced(inventories);
  check_own_memory(model.census());
  for (const auto& inventory : inventories) {
    if (inventory.is_changed()) check_present(inventory);
  }
  agree(model, module.name());
  for (auto& inventory : inventories) {
    if (inventory.is_changed() || options.dtype) choose_read_dtypes(model, inventory, options.dtype);
  }
  auto result = list_changes(model);
  change_around_groups(model, options);
  const auto casts = cast_buffers(model.census(), options.dtype);
  if (is_changed) {
    remake(model, result.moved);
  } else {
    root.note_names();
  }
  for (const auto& [buffer, cast] : casts) buffer.set_data(cast); // only now: a failed gather leaves all in one dtype
  return result;
}

} // namespace tessera
