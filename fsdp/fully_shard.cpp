#include <tessera/fsdp/fully_shard.h>

#include <ATen/core/grad_mode.h>
#include <absl/container/flat_hash_map.h>
#include <absl/container/flat_hash_set.h>

#include <tessera/fsdp/initial_weights.h>
#include <tessera/fsdp/parameter_group.h>
#include <tessera/fsdp/sharded_module.h>

namespace tessera {

namespace {

using fsdp_internal::MeshAxes;
using fsdp_internal::parameter_meta;
using fsdp_internal::ParameterGroup;
using fsdp_internal::Schedule;
using fsdp_internal::ShardedModule;
using torch::nn::Module;
using StatePtr = std::shared_ptr<ShardedModule>;

std::string describe(const std::vector<Module*>& modules) {
  std::string text;
  for (const auto* module : modules) text += (text.empty() ? "" : " + ") + module->name();
  return text;
}

/// The parameters below the given modules: those still free, and the states that claimed the others.
struct Census {
  std::vector<at::Tensor> free;
  std::vector<std::string> names;
  std::vector<StatePtr> states; // unique
};

Census take_census(const std::vector<Module*>& modules) {
  Census census;
  absl::flat_hash_set<const c10::TensorImpl*> seen;
  absl::flat_hash_set<const ShardedModule*> known;
  for (size_t m = 0; m < modules.size(); ++m) {
    for (const auto& item : modules[m]->named_parameters()) {
      if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue; // tied
      if (const auto* meta = parameter_meta(item.value())) {
        if (known.insert(meta->group->owner.get()).second) census.states.push_back(meta->group->owner);
        continue;
      }
      census.free.push_back(item.value());
      census.names.push_back(modules.size() == 1 ? item.key() : std::to_string(m) + "." + item.key());
    }
  }
  return census;
}

void check_parameter(const at::Tensor& parameter, const std::string& name, const at::Tensor& first) {
  TORCH_CHECK_VALUE(!dtensor_meta(parameter), "fully_shard: the parameter ", name, " is a DTensor already");
  TORCH_CHECK_VALUE(parameter.layout() == at::kStrided, "fully_shard: the parameter ", name, " has the layout ",
                    parameter.layout(), ", but only dense parameters can be sharded");
  TORCH_CHECK_VALUE(parameter.is_leaf(), "fully_shard: the parameter ", name, " is no leaf: it was computed from other tensors");
  TORCH_CHECK_VALUE(!parameter.grad().defined(), "fully_shard: the parameter ", name,
                    " has a gradient already; call zero_grad() before fully_shard");
  TORCH_CHECK_VALUE(parameter.is_meta() == first.is_meta(), "fully_shard: the parameter ", name, " is on ", parameter.device(),
                    " while others of its group are on ", first.device(),
                    "; build the whole module on the meta device or none of it");
}

void check_not_sharded(const std::vector<Module*>& modules, const Census& census) {
  for (const auto& state : census.states) {
    for (auto above = state; above; above = above->parent()) {
      for (const auto* module : modules) {
        TORCH_CHECK_VALUE(!above->holds(module), "fully_shard: the module ", module->name(), " is sharded already");
      }
    }
  }
}

absl::flat_hash_map<const Module*, std::string> paths_below(const std::vector<Module*>& modules) {
  absl::flat_hash_map<const Module*, std::string> paths;
  for (const auto* module : modules) {
    for (const auto& item : module->named_modules("", /*include_self=*/false)) paths.emplace(item.value().get(), item.key());
  }
  return paths;
}

/// Takes the groups made by earlier calls under `state`, and names them and their parameters from here.
void adopt_below(const StatePtr& state, const std::vector<Module*>& modules, const Census& census) {
  const auto paths = paths_below(modules);
  for (const auto& below : census.states) {
    StatePtr top = below;
    while (top->parent()) top = top->parent();
    const bool inside =
        std::any_of(top->modules().begin(), top->modules().end(), [&](auto* module) { return paths.contains(module); });
    if (top != state && inside) state->adopt(top);
  }
  int64_t number = 0;
  for (const auto& below : state->subtree()) {
    const auto found = paths.find(below->modules().front());
    const auto group = below->group();
    if (group) group->number = number++;
    if (found != paths.end() && group) group->set_label(found->second);
  }
  absl::flat_hash_set<const c10::TensorImpl*> named;
  for (const auto* module : modules) {
    for (const auto& item : module->named_parameters()) {
      const auto* meta = parameter_meta(item.value());
      if (!meta || !state->is_self_or_ancestor_of(*meta->group->owner) ||
          !named.insert(item.value().unsafeGetTensorImpl()).second)
        continue;
      if (modules.size() == 1) meta->group->parameters()[meta->index].name = item.key();
    }
  }
}

void move_buffers(const std::vector<Module*>& modules, c10::Device device) {
  const at::NoGradGuard no_grad;
  for (auto* module : modules) {
    for (const auto& buffer : module->buffers()) {
      if (buffer.defined() && !buffer.is_meta() && buffer.device() != device) buffer.set_data(buffer.to(device));
    }
  }
}

FSDPModule shard_modules(const std::vector<Module*>& modules, const MeshAxes& axes, const FullyShardOptions& options) {
  const auto census = take_census(modules);
  const std::string name = describe(modules);
  TORCH_CHECK_VALUE(!census.free.empty() || !census.states.empty(), "fully_shard: the module ", name, " has no parameter");
  check_not_sharded(modules, census);
  for (size_t i = 0; i < census.free.size(); ++i) check_parameter(census.free[i], census.names[i], census.free[0]);
  fsdp_internal::agree_on_initial_weights(census.free, census.names, axes.mesh(), options.initial_weights, name);

  auto state = std::make_shared<ShardedModule>(std::vector<const Module*>(modules.begin(), modules.end()), axes, options);
  state->set_schedule(std::make_shared<Schedule>(axes.mesh().device()));
  move_buffers(modules, axes.mesh().device());
  if (!census.free.empty()) {
    auto group = std::make_shared<ParameterGroup>(name, axes, options, state->schedule()->cache());
    group->owner = state;
    group->shard(census.free, census.names);
    state->set_group(group);
  }
  adopt_below(state, modules, census);
  return FSDPModule(state);
}

const DeviceMesh& checked(const DeviceMesh& mesh) {
  TORCH_CHECK_VALUE(mesh.defined(), "fully_shard: the mesh is undefined; make one with init_device_mesh");
  TORCH_CHECK_VALUE(mesh.coordinate().has_value(), "fully_shard: this rank is outside the mesh ", mesh.to_string());
  return mesh;
}

StatePtr find_state(const Module& module) {
  for (const auto& parameter : module.parameters()) {
    const auto* meta = parameter_meta(parameter);
    if (!meta) continue;
    for (auto state = meta->group->owner; state; state = state->parent()) {
      if (state->holds(&module)) return state;
    }
  }
  return nullptr;
}

} // namespace

FSDPModule fully_shard(Module& module, const DeviceMesh& mesh, const FullyShardOptions& options) {
  return shard_modules({&module}, MeshAxes::sharded(checked(mesh)), options);
}

FSDPModule fully_shard(const std::vector<std::shared_ptr<Module>>& modules, const DeviceMesh& mesh,
                       const FullyShardOptions& options) {
  TORCH_CHECK_VALUE(!modules.empty(), "fully_shard: the list of modules is empty");
  std::vector<Module*> pointers;
  for (const auto& module : modules) {
    TORCH_CHECK_VALUE(module, "fully_shard: module ", pointers.size(), " of the list is null");
    pointers.push_back(module.get());
  }
  return shard_modules(pointers, MeshAxes::sharded(checked(mesh)), options);
}

FSDPModule replicate(Module& module, const DeviceMesh& mesh, const FullyShardOptions& options) {
  return shard_modules({&module}, MeshAxes::replicated(checked(mesh)), options);
}

FSDPModule fsdp(const Module& module) {
  auto state = find_state(module);
  TORCH_CHECK_VALUE(state, "the module ", module.name(), " is not sharded: call fully_shard on it first");
  return FSDPModule(std::move(state));
}

bool is_sharded(const Module& module) { return find_state(module) != nullptr; }

} // namespace tessera
