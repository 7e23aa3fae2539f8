#include <tessera/fsdp/reshard_parameters.h>

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <absl/container/flat_hash_map.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include <tessera/base/error_text.h>
#include <tessera/collectives/ranks/gather_texts.h>
#include <tessera/dtensor/api.h>
#include <tessera/dtensor/tensor/in_backward.h>
#include <tessera/fsdp/model/gradient_hooks.h>
#include <tessera/fsdp/schedule/scheduled_group.h>
#include <tessera/fsdp/setup/group_making.h>
#include <tessera/fsdp/setup/initial_weights.h>
#include <tessera/fsdp/setup/model_inventory.h>
#include <tessera/fsdp/setup/unsharded_dtypes.h>

namespace tessera {

namespace internal {

namespace {

void check_present(const ModuleInventory& inventory) {
  if (!inventory.is_changed()) return;
  for (const auto& each : inventory.present) {
    const auto check = [&](bool holds, const char* problem) {
      TORCH_CHECK(holds, "reshard_parameters: the parameter ", each.name, problem);
    };
    if (!each.before) {
      check_parameter(each.tensor, each.name, each.tensor, inventory.state->roles().mesh());
      check(!dtensor_meta(each.tensor), " is a DTensor over other dims of the mesh, which only fully_shard takes");
      check(!each.tensor.is_meta(), " is on the meta device: give it values first");
    } else {
      check(each.before->leaf.defined(), " is on the meta device: call tessera::materialize first");
      check(!each.before->forward.parallel, " lies over other dims of the mesh too, and its group cannot be made again");
      check(!each.tensor.grad().defined(),
            " has a gradient, whose parts would lie elsewhere: take the step and call zero_grad first");
    }
  }
}

/// Before any change: a norm may be unable to mix them.
void choose_read_dtypes(const ModelInventory& model, ModuleInventory& inventory, const std::optional<at::ScalarType>& dtype) {
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

/// What all ranks of one mesh must have found alike, and the new parameters.
struct Findings {
  DeviceMesh mesh;
  std::string description = {};
  std::vector<at::Tensor> added = {};
  std::vector<std::string> names = {};
};

/// Adds what was found among the parameters that the ranks of this mesh have.
void describe(const ModuleInventory& inventory, Findings& findings) {
  if (!inventory.is_changed()) return;
  const auto is_here = [&](const DeviceMesh& mesh) { return mesh == findings.mesh; };
  std::vector<std::string> removed;
  for (const auto& each : inventory.removed) {
    if (is_here(each.mesh)) removed.push_back(each.name);
  }
  findings.description += fmt::format("\nof {} removed [{}]", inventory.state->label(), fmt::join(removed, ", "));
  for (const auto& each : inventory.present) {
    if (!is_here(each.mesh)) continue;
    findings.description += fmt::format("\n{} {} in {}", each.before ? "kept" : "new", each.name, c10::toString(each.dtype));
    if (each.before) continue;
    findings.added.push_back(each.tensor);
    findings.names.push_back(each.name);
  }
}

/// They come by meshes, the root's first. A mesh that `shard_placement_fn` chose is one too: the ranks of others have other
/// parameters.
std::vector<Findings> findings_of(ModelInventory& model) {
  std::vector<Findings> all{{.mesh = model.root().roles().mesh()}};
  const auto add = [&](const DeviceMesh& mesh) {
    if (std::none_of(all.begin(), all.end(), [&](const Findings& each) { return each.mesh == mesh; }))
      all.push_back({.mesh = mesh});
  };
  for (const auto& inventory : model.inventories()) {
    add(inventory.state->roles().mesh());
    for (const auto& group : inventory.groups) add(inventory.mesh_of(*group));
  }
  all[0].description = fmt::format("\ngone [{}]", fmt::join(model.gone(), ", "));
  if (model.has_chosen_meshes()) all[0].description += "\nothers on meshes of shard_placement_fn";
  for (auto& each : all) {
    for (const auto& inventory : model.inventories()) describe(inventory, each);
  }
  return all;
}

/// Throws on all ranks of the root where those of a mesh that was chosen for parameters differ: the others would go on.
void agree(ModelInventory& model, const std::string& module) {
  const auto& root = model.root();
  std::exception_ptr failure;
  for (const auto& [mesh, description, added, names] : findings_of(model)) {
    try {
      agree_on_initial_weights({.tensors = added,
                                .names = names,
                                .mesh = mesh,
                                .mode = root.options().initial_weights,
                                .call = "reshard_parameters of " + module,
                                .options = description,
                                .model_number = root.model().number});
    } catch (...) {
      if (mesh == root.roles().mesh()) throw;
      if (!failure) failure = std::current_exception();
    }
  }
  const auto& mesh = root.roles().mesh();
  if (model.has_chosen_meshes() && mesh.size() > 1)
    throw_failures(failure ? error_text(failure) : "", *mesh.flatten().communicator(), mesh.device(),
                   "reshard_parameters's meshes");
  if (failure) std::rethrow_exception(failure);
}

/// The group, or groups, of a state anew.
class Remaking {
 public:
  Remaking(ModuleInventory& inventory, std::shared_ptr<ModelResources> resources)
      : inventory_(inventory), resources_(std::move(resources)) {}

  /// The groups that take the place of the first one of before, of what `take` returned. Names of kept parameters that lie
  /// elsewhere are added to `moved`.
  std::vector<GroupPtr> run(std::span<const FreeParameter> free, std::vector<std::string>& moved) {
    const auto before = specs();
    std::vector<GroupPtr> made;
    for (const auto& group : inventory_.groups) retire_gradients(*group);
    if (!free.empty()) {
      const auto parts = parts_of(free);
      std::vector<std::optional<GradientSettings>> settings; // copies, which the groups that are made would replace
      for (const auto& part : parts) settings.push_back(settings_before(part));
      made = make_groups(inventory_.state, parts, resources_);
      for (size_t i = 0; i < parts.size(); ++i) give_settings(parts[i], settings[i]);
    }
    for (const auto& group : inventory_.groups) {
      for (size_t i = 0; i < group->parameters().size(); ++i) group->release_parameter(i); // those that were removed
    }
    note_moved(before, moved);
    return made;
  }

  /// Gathers the kept ones, whole.
  std::vector<FreeParameter> take() const {
    std::vector<FreeParameter> free;
    for (size_t i = 0; i < inventory_.present.size(); ++i) {
      const auto& each = inventory_.present[i];
      const auto* meta = parameter_meta(each.tensor);
      const auto whole = each.before ? DTensor(each.tensor).full_tensor() : each.tensor.detach();
      free.push_back({.tensor = each.tensor,
                      .place = each.place,
                      .dtype = inventory_.read_dtypes[i],
                      .placement = each.before ? each.before->origin.chosen : std::nullopt,
                      .value = whole.to(each.dtype),
                      .extension = meta ? meta->group->gather().extended().extension_of(meta->index) : nullptr,
                      .is_quantized = meta && meta->group->gather().messages().contains(meta->index)});
    }
    return free;
  }

 private:
  std::vector<SpecPtr> specs() const {
    std::vector<SpecPtr> all;
    for (const auto& each : inventory_.present) all.push_back(each.before ? each.before->spec : nullptr);
    return all;
  }

  static bool lies_as(const MeshPart& part, const ParameterGroup& group) {
    if (!part.is_beside() || !group.part.is_beside) return part.is_beside() == group.part.is_beside;
    return group.roles().data_parallel() == part.mesh && group.roles().shards() != part.is_whole;
  }

  /// The group of before that lies as a part does; null for none.
  GroupPtr group_before(const MeshPart& part) const {
    const auto found = std::find_if(inventory_.groups.begin(), inventory_.groups.end(),
                                    [&](const GroupPtr& group) { return lies_as(part, *group); });
    return found == inventory_.groups.end() ? nullptr : *found;
  }

  /// How a parameter lies: a kept one as before, a new one as the module says.
  MeshPart part_for(const FreeParameter& free) const {
    const auto* meta = parameter_meta(free.tensor);
    if (!meta || !meta->group->part.is_beside) return {.roles = inventory_.state->roles()};
    const auto& roles = meta->group->roles();
    return {.mesh = roles.data_parallel(), .is_whole = !roles.shards(), .roles = roles};
  }

  /// The stages of each part are those of before, with the program's own communicators.
  std::vector<MeshPart> parts_of(std::span<const FreeParameter> free) const {
    std::vector<MeshPart> parts;
    for (const auto& each : free) {
      auto part = part_for(each);
      const auto same = [&](const MeshPart& other) { return other.mesh == part.mesh && other.is_whole == part.is_whole; };
      auto found = std::find_if(parts.begin(), parts.end(), same);
      if (found == parts.end()) found = parts.insert(part.is_beside() ? parts.end() : parts.begin(), std::move(part));
      found->parameters.push_back(each);
    }
    for (auto& part : parts) part.stages = stages_of(part);
    return parts;
  }

  Stages stages_of(const MeshPart& part) const {
    if (const auto before = group_before(part)) return before->stages();
    const auto& options = inventory_.state->options();
    return connect_stages(*part.roles, options.reshard_after_forward, options.communicators);
  }

  /// A copy, which the first group that is made would replace.
  std::optional<GradientSettings> settings_before(const MeshPart& part) const {
    if (inventory_.groups.empty()) return std::nullopt;
    const auto group = group_before(part);
    for (const auto& each : inventory_.state->module_groups()) {
      if (each.group.lock() != (group ? group : inventory_.groups[0])) continue;
      auto settings = each.gradients->unshared().settings;
      if (!group) settings.divide_factor.reset(); // of experts
      return settings;
    }
    return std::nullopt;
  }

  void give_settings(const MeshPart& part, const std::optional<GradientSettings>& settings) const {
    for (const auto& each : inventory_.state->module_groups()) {
      const auto group = each.group.lock();
      if (!group || !lies_as(part, *group)) continue;
      if (settings) {
        each.gradients->unshared().settings = *settings;
      } else {
        take_settings_above(each.gradients->unshared().settings);
      }
    }
  }

  /// Gives a module that had no group the settings of the next one above that has one.
  void take_settings_above(GradientSettings& settings) const {
    auto above = inventory_.state->parent();
    while (above && !above->group()) above = above->parent();
    if (!above) return;
    const ModelLock lock(above->schedule()->mutex());
    const auto& theirs = above->gradients(lock).settings;
    settings.requires_sync = theirs.requires_sync;
    settings.requires_all_reduce = theirs.requires_all_reduce;
    settings.has_only_buffer = theirs.has_only_buffer;
    settings.keeps_own = theirs.keeps_own;
    settings.takers = theirs.takers;
  }

  void note_moved(const std::vector<SpecPtr>& before, std::vector<std::string>& moved) const {
    for (size_t i = 0; i < before.size(); ++i) {
      const auto& present = inventory_.present[i];
      if (!present.before) continue;
      const auto* meta = parameter_meta(present.tensor);
      meta->group->parameters()[meta->index].origin.memory = present.before->origin.memory;
      if (meta->spec != before[i]) moved.push_back(present.name);
    }
  }

  ModuleInventory& inventory_;
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

void remake(ModelInventory& model, std::vector<std::string>& moved) {
  auto& root = model.root();
  const auto old_schedule = root.schedule();
  const auto schedule = std::make_shared<Schedule>(root.roles().mesh().device());
  schedule->take_settings(*old_schedule);
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
  root.attach(schedule);
}

/// Lists what was added and removed, without what is moved.
ReshardedParameters list_changes(ModelInventory& model) {
  ReshardedParameters changes{.added = {}, .removed = model.gone(), .moved = {}};
  for (const auto& inventory : model.inventories()) {
    for (const auto& each : inventory.present) {
      if (!each.before) changes.added.push_back(each.name);
    }
    for (const auto& each : inventory.removed) changes.removed.push_back(each.name);
  }
  return changes;
}

/// The names of modules may have changed where nothing else did.
void rename(const ModuleInventory& inventory) {
  for (const auto& each : inventory.present) {
    each.before->origin.place = each.place;
  }
}

/// What is new also where each group stays as it is.
void change_around_groups(ModelInventory& model, const ReshardParametersOptions& options) {
  auto& root = model.root();
  for (const auto& inventory : model.inventories()) {
    if (!inventory.is_changed()) rename(inventory);
  }
  for (const auto& item : model.census().ignored) root.model().ignore(item.tensor);
  move_buffers(model.census().buffers, root.roles().mesh().device());
  model.claim_new_modules();
}

void check_reduced(const std::vector<ModuleInventory>& inventories) {
  for (const auto& inventory : inventories) {
    for_each_group(*inventory.state, /*recurse=*/false, [](const GroupGradients& gradients) {
      TORCH_CHECK(!gradients.is_unfinished(), "reshard_parameters: gradients of ", gradients.group().label(),
                  " wait for their reduction: run a synchronized backward, take the step and call zero_grad first");
    });
  }
}

} // namespace

} // namespace internal

ReshardedParameters reshard_parameters(torch::nn::Module& module, const ReshardParametersOptions& options) {
  using namespace internal; // NOLINT(google-build-using-namespace)
  TORCH_CHECK_VALUE(!c10::InferenceMode::is_enabled(), "reshard_parameters: called in InferenceMode; call it outside");
  TORCH_CHECK(!in_backward(), "reshard_parameters: called inside a backward");
  TORCH_CHECK_VALUE(!options.dtype || at::isFloatingType(*options.dtype), "reshard_parameters: the dtype ", *options.dtype,
                    " is no floating-point one");
  const at::NoGradGuard no_grad;
  ModelInventory model(module, options.ignored_params, options.dtype);
  auto& root = model.root();
  auto& inventories = model.inventories();
  root.schedule()->forget_failed_backward();
  const bool is_changed = std::any_of(inventories.begin(), inventories.end(), [](const auto& each) { return each.is_changed(); });
  if (is_changed) check_reduced(inventories);
  check_own_memory(model.census());
  for (const auto& inventory : inventories) check_present(inventory);
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
