#include <tessera/fsdp/fully_shard.h>

#include <ATen/core/grad_mode.h>
#include <absl/container/flat_hash_map.h>
#include <absl/container/flat_hash_set.h>
#include <c10/core/InferenceMode.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <tessera/collectives/process_context.h>
#include <tessera/fsdp/initial_weights.h>
#include <tessera/fsdp/parameter_group.h>
#include <tessera/fsdp/sharded_module.h>

namespace tessera {

namespace {

using fsdp_internal::MemoryRange;
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

/// The parameters below the given modules: those still free, those of groups made by earlier calls, and the states of these.
struct Census {
  std::vector<at::Tensor> free, sharded;
  std::vector<std::string> names, sharded_names;
  std::vector<StatePtr> states; // unique
};

Census take_census(const std::vector<Module*>& modules) {
  Census census;
  absl::flat_hash_set<const c10::TensorImpl*> seen;
  absl::flat_hash_set<const ShardedModule*> known;
  for (size_t m = 0; m < modules.size(); ++m) {
    for (const auto& item : modules[m]->named_parameters()) {
      if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue; // tied
      const auto* meta = parameter_meta(item.value());
      if (meta && known.insert(meta->group->owner.get()).second) census.states.push_back(meta->group->owner);
      (meta ? census.sharded : census.free).push_back(item.value());
      (meta ? census.sharded_names : census.names)
          .push_back(modules.size() == 1 ? item.key() : std::to_string(m) + "." + item.key());
    }
  }
  return census;
}

void check_parameter(const at::Tensor& parameter, const std::string& name, const at::Tensor& first) {
  TORCH_CHECK_VALUE(!dtensor_meta(parameter), "fully_shard: the parameter ", name, " is a DTensor already");
  TORCH_CHECK_VALUE(parameter.layout() == at::kStrided, "fully_shard: the parameter ", name, " has the layout ",
                    parameter.layout(), ", but only dense parameters can be sharded");
  TORCH_CHECK_VALUE(!parameter.is_quantized(), "fully_shard: the parameter ", name,
                    " is quantized, but only dense parameters can be sharded");
  TORCH_CHECK_VALUE(!parameter.is_inference(), "fully_shard: the parameter ", name,
                    " was made in InferenceMode, whose tensors cannot be sharded; build the module outside of it");
  TORCH_CHECK_VALUE(parameter.is_leaf(), "fully_shard: the parameter ", name, " is no leaf: it was computed from other tensors");
  TORCH_CHECK_VALUE(!parameter.grad().defined(), "fully_shard: the parameter ", name,
                    " has a gradient already; call zero_grad() before fully_shard");
  TORCH_CHECK_VALUE(parameter.is_meta() == first.is_meta(), "fully_shard: the parameter ", name, " is on ", parameter.device(),
                    " while others of its group are on ", first.device(),
                    "; build the whole module on the meta device or none of it");
}

/// Two parameters of one memory would become two shards that no longer change together.
void check_own_memory(const Census& census, const std::vector<Module*>& modules) {
  absl::flat_hash_map<const c10::StorageImpl*, std::vector<std::pair<MemoryRange, std::string>>> parameters;
  const auto check = [&](const std::optional<MemoryRange>& range, const char* kind, const std::string& name) {
    if (!range) return;
    for (const auto& [other, other_name] : parameters[range->storage()]) {
      TORCH_CHECK_VALUE(!range->overlaps(other), "fully_shard: the ", kind, " ", name, " shares memory with the parameter ",
                        other_name, "; register one tensor under both names, or give each its own memory with clone()");
    }
  };
  const auto add = [&](const std::optional<MemoryRange>& range, const std::string& name) {
    check(range, "parameter", name);
    if (range) parameters[range->storage()].emplace_back(*range, name);
  };
  for (size_t i = 0; i < census.sharded.size(); ++i) {
    const auto* meta = parameter_meta(census.sharded[i]);
    add(meta->group->parameters()[meta->index].original, census.sharded_names[i]);
  }
  for (size_t i = 0; i < census.free.size(); ++i) add(MemoryRange::of(census.free[i]), census.names[i]);
  for (const auto* module : modules) {
    for (const auto& buffer : module->named_buffers()) check(MemoryRange::of(buffer.value()), "buffer", buffer.key());
  }
}

using Paths = absl::flat_hash_map<const Module*, std::string>;

Paths paths_below(const std::vector<Module*>& modules) {
  Paths paths;
  for (const auto* module : modules) {
    for (const auto& item : module->named_modules("", /*include_self=*/false)) paths.emplace(item.value().get(), item.key());
  }
  return paths;
}

void check_not_sharded(const std::vector<Module*>& modules, const Census& census) {
  for (const auto& state : census.states) {
    for (auto above = state; above; above = above->parent()) {
      for (const auto* module : modules) {
        TORCH_CHECK_VALUE(!above->holds(module), "fully_shard: the module ", module->name(), " is sharded already");
        TORCH_CHECK_VALUE(!above->held_below(module), "fully_shard: the parameters of ", module->name(),
                          " were sharded with a module above it: shard bottom-up, first the blocks, then what holds them");
      }
    }
  }
}

void check_policy(const MixedPrecisionPolicy& policy) {
  const auto check = [](const char* name, const std::optional<at::ScalarType>& dtype) {
    TORCH_CHECK_VALUE(!dtype || at::isFloatingType(*dtype), "fully_shard: ", name, " of the mixed precision policy is ", *dtype,
                      ", but must be a floating-point dtype");
  };
  check("param_dtype", policy.param_dtype);
  check("reduce_dtype", policy.reduce_dtype);
  check("output_dtype", policy.output_dtype);
}

/// The groups below, in the model's order, and what their values were: ranks that broadcast them in different orders mixed them
/// up.
std::string describe(const Census& census, const Paths& paths) {
  std::string text;
  for (const auto& state : census.states) {
    const auto found = paths.find(state->modules().front());
    if (found != paths.end())
      text += fmt::format("\n{} sharded with values of checksum {}", found->second, state->initial_checksum);
  }
  return text;
}

/// `fully_shard` or `replicate`.
struct Kind {
  const char* name;
  MeshAxes (*axes)(const DeviceMesh&);
};
constexpr Kind kFullyShard{"fully_shard", &MeshAxes::sharded}, kReplicate{"replicate", &MeshAxes::replicated};

/// What every rank must ask for alike.
std::string describe(const Kind& kind, const DeviceMesh& mesh, const FullyShardOptions& options) {
  const auto dtype = [](const std::optional<at::ScalarType>& type) { return type ? c10::toString(*type) : "unset"; };
  const auto& policy = options.mixed_precision;
  return fmt::format(
      "{} over {} ranks, the layout {}, reshard_after_forward {}, param_dtype {}, reduce_dtype {}, initial_weights {}", kind.name,
      fmt::join(mesh.shape(), " x "), options.layout == BufferLayout::kRagged ? "kRagged" : "kPerParameter",
      options.reshard_after_forward ? (*options.reshard_after_forward ? "true" : "false") : "unset", dtype(policy.param_dtype),
      dtype(policy.reduce_dtype), static_cast<int>(options.initial_weights));
}

/// What the names of a second model's groups end with: its collectives must not be taken for those of the first.
std::string in_model(int64_t number) { return number > 1 ? fmt::format(" of model {}", number) : ""; }

/// For the model that a call makes or completes: one number from its first call to its last.
int64_t next_number(const Census& census) {
  int64_t number = process_context().next_number();
  for (const auto& state : census.states) {
    if (state->model_number > 0) number = std::min(number, state->model_number);
  }
  return number;
}

/// Takes the groups made by earlier calls under `state`, and names them and their parameters from here.
void adopt_below(const StatePtr& state, const std::vector<Module*>& modules, const Census& census, const Paths& paths) {
  for (const auto& below : census.states) {
    StatePtr top = below;
    while (top->parent()) top = top->parent();
    const bool inside =
        std::any_of(top->modules().begin(), top->modules().end(), [&](auto* module) { return paths.contains(module); });
    if (top != state && inside) state->adopt(top);
  }
  if (const auto group = state->group()) group->set_label(describe(modules) + in_model(state->model_number));
  int64_t number = 0;
  for (const auto& below : state->subtree()) {
    const auto found = paths.find(below->modules().front());
    const auto group = below->group();
    if (group) group->number = number++;
    if (found != paths.end() && group) group->set_label(found->second + in_model(state->model_number));
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

FSDPModule shard_modules(const std::vector<Module*>& modules, const Kind& kind, const DeviceMesh& mesh,
                         const FullyShardOptions& options) {
  const auto census = take_census(modules);
  const std::string name = describe(modules);
  TORCH_CHECK_VALUE(!census.free.empty() || !census.states.empty(), "fully_shard: the module ", name, " has no parameter");
  check_not_sharded(modules, census);
  check_policy(options.mixed_precision);
  for (size_t i = 0; i < census.free.size(); ++i) check_parameter(census.free[i], census.names[i], census.free[0]);
  check_own_memory(census, modules);
  const auto paths = paths_below(modules);
  const auto agreement =
      fsdp_internal::agree_on_initial_weights(census.free, census.names, mesh, options.initial_weights, name,
                                              describe(kind, mesh, options) + describe(census, paths), next_number(census));

  const auto axes = kind.axes(mesh); // connects the ranks along its dims: they agree on them now
  auto state = std::make_shared<ShardedModule>(std::vector<const Module*>(modules.begin(), modules.end()), axes, options);
  for (const auto& [module, path] : paths) state->add_below(module);
  state->initial_checksum = agreement.checksum;
  state->model_number = agreement.model_number;
  state->set_schedule(std::make_shared<Schedule>(mesh.device()));
  move_buffers(modules, mesh.device());
  if (!census.free.empty()) {
    auto group = std::make_shared<ParameterGroup>(name, axes, options, state->schedule()->cache());
    group->owner = state;
    group->shard(census.free, census.names);
    state->set_group(group);
  }
  adopt_below(state, modules, census, paths);
  return FSDPModule(state);
}

const DeviceMesh& checked(const DeviceMesh& mesh) {
  TORCH_CHECK_VALUE(!c10::InferenceMode::is_enabled(),
                    "fully_shard: called in InferenceMode, whose tensors cannot be trained; call "
                    "it outside, and run the forward inside");
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
  return shard_modules({&module}, kFullyShard, checked(mesh), options);
}

FSDPModule fully_shard(const std::vector<std::shared_ptr<Module>>& modules, const DeviceMesh& mesh,
                       const FullyShardOptions& options) {
  TORCH_CHECK_VALUE(!modules.empty(), "fully_shard: the list of modules is empty");
  std::vector<Module*> pointers;
  for (const auto& module : modules) {
    TORCH_CHECK_VALUE(module, "fully_shard: module ", pointers.size(), " of the list is null");
    pointers.push_back(module.get());
  }
  return shard_modules(pointers, kFullyShard, checked(mesh), options);
}

FSDPModule replicate(Module& module, const DeviceMesh& mesh, const FullyShardOptions& options) {
  return shard_modules({&module}, kReplicate, checked(mesh), options);
}

FSDPModule fsdp(const Module& module) {
  auto state = find_state(module);
  TORCH_CHECK_VALUE(state, "the module ", module.name(), " is not sharded: call fully_shard on it first");
  return FSDPModule(std::move(state));
}

bool is_sharded(const Module& module) { return find_state(module) != nullptr; }

} // namespace tessera
