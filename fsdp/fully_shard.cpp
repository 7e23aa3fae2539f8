#include <tessera/fsdp/fully_shard.h>

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/cuda.h>

#include <exception>
#include <limits>
#include <utility>

#include <tessera/collectives/error_text.h>
#include <tessera/collectives/gather_texts.h>
#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/view_replay.h>
#include <tessera/fsdp/census.h>
#include <tessera/fsdp/gradient_hooks.h>
#include <tessera/fsdp/group_making.h>
#include <tessera/fsdp/initial_weights.h>
#include <tessera/fsdp/module_walk.h>
#include <tessera/fsdp/parameter_group.h>
#include <tessera/fsdp/sharded_module.h>
#include <tessera/fsdp/unsharded_dtypes.h>
#include <tessera/offload/aligned_memory.h>
#include <tessera/offload/make_offload_memory.h>

namespace tessera {

using torch::nn::Module;

namespace internal {

namespace {

using StatePtr = std::shared_ptr<ShardedModule>;

std::string describe(const std::vector<Module*>& modules) {
  std::string text;
  for (const auto* module : modules) text += (text.empty() ? "" : " + ") + module->name();
  return text;
}

} // namespace

void check_parameter(const at::Tensor& parameter, const std::string& name, const at::Tensor& first) {
  const auto check = [&](bool holds, const auto&... problem) {
    TORCH_CHECK_VALUE(holds, "fully_shard: the parameter ", name, problem...);
  };
  check(!dtensor_meta(parameter), " is a DTensor already");
  check(parameter.layout() == at::kStrided, " has the layout ", parameter.layout(), ", but only dense parameters can be sharded");
  check(!parameter.is_quantized(), " is quantized, but only dense parameters can be sharded");
  check(!parameter.is_inference(), " was made in InferenceMode, whose tensors cannot be sharded; build the module outside of it");
  check(parameter.is_leaf(), " is no leaf: it was computed from other tensors");
  check(!parameter.grad().defined(), " has a gradient already; call zero_grad() before fully_shard");
  check(parameter.is_meta() == first.is_meta(), " is on ", parameter.device(), " while others of its group are on ",
        first.device(), "; build the whole module on the meta device or none of it");
}

namespace {

void check_not_sharded(const std::vector<Module*>& modules, const Census& census) {
  for (const auto& root : census.roots) {
    for (const auto* module : modules) {
      const auto claim = root->claim_on(module);
      TORCH_CHECK_VALUE(claim != ShardedModule::Claim::kHeld, "fully_shard: the module ", module->name(), " is sharded already");
      TORCH_CHECK_VALUE(claim == ShardedModule::Claim::kNone, "fully_shard: the parameters of ", module->name(),
                        " were sharded with a module above it: shard bottom-up, first the blocks, then what holds them");
    }
  }
}

void check_mesh(const DeviceMesh& mesh) {
  TORCH_CHECK_VALUE(!c10::InferenceMode::is_enabled(),
                    "fully_shard: called in InferenceMode, whose tensors cannot be trained; call "
                    "it outside, and run the forward inside");
  TORCH_CHECK_VALUE(mesh.defined(), "fully_shard: the mesh is undefined; make one with init_device_mesh");
  TORCH_CHECK_VALUE(mesh.coordinate().has_value(), "fully_shard: this rank is outside the mesh ", mesh.to_string());
}

void check_buckets(const FullyShardOptions& options) {
  TORCH_CHECK_VALUE(options.bucket_bytes > 0, "fully_shard: bucket_bytes is ", options.bucket_bytes, ", but must be positive");
}

void check_policy(const MixedPrecisionPolicy& policy) {
  const auto check = [](const char* name, const std::optional<at::ScalarType>& dtype) {
    TORCH_CHECK_VALUE(!dtype || at::isFloatingType(*dtype), "fully_shard: ", name, " of the mixed precision policy is ", *dtype,
                      ", but must be a floating-point dtype");
  };
  check("param_dtype", policy.param_dtype);
  check("reduce_dtype", policy.reduce_dtype);
  check("output_dtype", policy.output_dtype);
  for (const auto& entry : policy.keep_in_fp32)
    TORCH_CHECK_VALUE(!entry.empty(), "fully_shard: keep_in_fp32 of the mixed precision policy has an empty name");
}

std::string describe(const std::optional<ReshardAfterForward>& option) {
  if (!option) return "unset";
  return option->ranks() ? std::to_string(*option->ranks()) : *option ? "true" : "false";
}

const char* describe(const OffloadPolicy& policy) {
  using Memory = OffloadPolicy::Memory;
  return policy.memory == Memory::kFiles ? "to files" : policy.memory == Memory::kHost ? "to the host" : "unset";
}

/// What every rank must ask for alike.
std::string describe(Strategy strategy, const DeviceMesh& mesh, const FullyShardOptions& options) {
  const auto dtype = [](const std::optional<at::ScalarType>& type) { return type ? c10::toString(*type) : "unset"; };
  const auto& policy = options.mixed_precision;
  return fmt::format(
      "the strategy {} over {} ranks, the layout {}, reshard_after_forward {}, param_dtype {}, reduce_dtype {}, keep_in_fp32 "
      "[{}], "
      "initial_weights {}, bucket_bytes {}, communicators {}, offload {}",
      row_of(strategy).name, fmt::join(mesh.shape(), " x "),
      options.layout == BufferLayout::kRagged ? "kRagged" : "kPerParameter", describe(options.reshard_after_forward),
      dtype(policy.param_dtype), dtype(policy.reduce_dtype), fmt::join(policy.keep_in_fp32, ", "),
      static_cast<int>(options.initial_weights), options.bucket_bytes,
      options.communicators == CommunicatorUse::kShared ? "kShared" : "kSeparate", describe(options.offload));
}

/// The models of earlier calls that a call completes. Another one may share a module with it.
std::vector<StatePtr> roots_below(const Census& census) {
  std::vector<StatePtr> below;
  for (const auto& root : census.roots) {
    const auto modules = root->modules();
    if (std::any_of(modules.begin(), modules.end(), [&](auto* module) { return census.walk.is_below(module); }))
      below.push_back(root);
  }
  return below;
}

/// For the model that a call makes or completes: one number from its first call to its last.
int64_t next_number(const Census& census) {
  int64_t number = process_context().next_number();
  for (const auto& root : roots_below(census)) {
    if (root->model_number > 0) number = std::min(number, root->model_number);
  }
  return number;
}

/// Before another schedule takes over: what a failed backward has left, and what is gathered.
void close(ShardedModule& root) {
  root.schedule()->forget_failed_backward();
  for (const auto& state : root.subtree()) {
    if (const auto group = state->group()) root.schedule()->reshard(*group);
  }
}

/// Takes the models made by earlier calls under `state`.
void adopt_below(const StatePtr& state, const Census& census) {
  const auto& walk = census.walk;
  for (const auto& root : roots_below(census)) {
    std::vector<Place> places;
    for (const auto* module : root->modules()) {
      places.push_back(walk.is_below(module) ? walk.place_of(walk.visit_of(module)) : Place{0, std::to_string(places.size())});
    }
    state->adopt(root, std::move(places));
  }
  for (const auto& visit : walk.visits()) {
    if (!visit.is_top()) state->add_below(visit.module);
  }
}

/// Without what the call alone needs. The state knows the ignored parameters, and must not keep their memory.
FullyShardOptions kept_of(FullyShardOptions options) {
  options.ignored_params.clear();
  options.shard_placement_fn = nullptr;
  options.gather_extension_fn = nullptr;
  return options;
}

} // namespace

CommunicatorPtr connect_neighbours(const MeshAxes& axes, const std::optional<ReshardAfterForward>& option) {
  if (!option) return nullptr;
  TORCH_CHECK_VALUE(!*option || !axes.keeps_parameters(), "fully_shard: the strategy ", row_of(axes.strategy()).name,
                    " keeps the parameters gathered, but reshard_after_forward is ", describe(option));
  if (!option->ranks() || *option->ranks() == 1 || *option->ranks() == axes.shard_ranks()) return nullptr;
  return axes.neighbours(*option->ranks());
}

void move_buffers(const std::vector<Registered>& buffers, c10::Device device) {
  const at::NoGradGuard no_grad;
  for (const auto& [buffer, visit, key] : buffers) {
    if (buffer.defined() && !buffer.is_meta() && buffer.device() != device) buffer.set_data(buffer.to(device));
  }
}

namespace {

FreeParameters part_of(const FreeParameters& all, size_t begin, size_t end) {
  const auto cut = [&](const auto& each) {
    return std::decay_t<decltype(each)>(each.begin() + static_cast<std::ptrdiff_t>(begin),
                                        each.begin() + static_cast<std::ptrdiff_t>(end));
  };
  return {cut(all.tensors),
          cut(all.places),
          cut(all.dtypes),
          cut(all.placements),
          all.values.empty() ? all.values : cut(all.values),
          all.extensions.empty() ? all.extensions : cut(all.extensions)};
}

/// The first line of what an exception says.
std::string summary_of(const std::exception_ptr& thrown) {
  const auto text = error_text(thrown);
  return text.substr(0, text.find('\n'));
}

/// What the program chose for each parameter, and a line for each on which all ranks must agree. Where its function throws on
/// some ranks, the others would wait for these: the exception is a line as well.
std::vector<std::optional<Placement>> choose_placements(const std::vector<at::Tensor>& tensors,
                                                        const std::vector<std::string>& names, const ShardPlacementFn& choose,
                                                        std::string& description, std::exception_ptr& thrown) {
  std::vector<std::optional<Placement>> placements(tensors.size());
  for (size_t i = 0; choose && !thrown && i < tensors.size(); ++i) {
    try {
      placements[i] = choose(names[i], tensors[i]);
      if (placements[i]) description += fmt::format("\n{} placed {}", names[i], to_string(*placements[i]));
    } catch (...) {
      thrown = std::current_exception();
      description += fmt::format("\nshard_placement_fn threw for {}: {}", names[i], summary_of(thrown));
    }
  }
  return placements;
}

void check_placements(const FreeParameters& free, const std::vector<std::string>& names, const MeshAxes& axes) {
  for (size_t i = 0; i < names.size(); ++i) {
    TORCH_CHECK_VALUE(!free.placements[i] || axes.strategy() != Strategy::kNoShard, "fully_shard: shard_placement_fn chose ",
                      to_string(*free.placements[i]), " for ", names[i], ", but the strategy no-shard splits no parameter");
    check_placement({names[i], free.tensors[i].sizes().vec(), free.dtypes[i], free.placements[i]}, axes.shard_ranks());
  }
}

/// Neighbouring parameters of at most `bytes` together, or one alone.
std::vector<std::pair<size_t, size_t>> bucket_ranges(const std::vector<at::Tensor>& tensors, int64_t bytes) {
  std::vector<std::pair<size_t, size_t>> ranges;
  int64_t taken = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto size = static_cast<int64_t>(tensors[i].nbytes());
    if (ranges.empty() || taken + size > bytes) {
      ranges.emplace_back(i, i);
      taken = 0;
    }
    taken += size;
    ranges.back().second = i + 1;
  }
  return ranges;
}

std::shared_ptr<ParameterGroup> make_group(const StatePtr& state, const FreeParameters& parameters,
                                           const std::shared_ptr<ModelResources>& resources,
                                           std::shared_ptr<OffloadMemory> memory) {
  auto group = std::make_shared<ParameterGroup>(state, state->axes(), state->options(), resources);
  group->shard(parameters, std::move(memory));
  redirect_gradients(*group);
  state->set_group(group);
  return group;
}

/// Where each part of a call's parameters will lie, with room for their gradients; null for the device's memory. An error on
/// every rank where it fails on one.
std::vector<std::shared_ptr<OffloadMemory>> reserve_memory(const FullyShardOptions& options, const MeshAxes& axes,
                                                           const std::vector<FreeParameters>& parts) {
  std::vector<std::shared_ptr<OffloadMemory>> memories(parts.size());
  const auto& mesh = axes.mesh();
  const auto memory = options.offload.memory;
  if (memory == OffloadPolicy::Memory::kDevice || (memory == OffloadPolicy::Memory::kHost && mesh.device().is_cpu()))
    return memories;
  std::string failure;
  try {
    for (size_t i = 0; i < parts.size(); ++i) {
      memories[i] = make_offload_memory(options.offload, mesh.device());
      const auto bytes = shard_bytes_of(parts[i], options.layout, axes);
      memories[i]->reserve(2 * whole_pages(bytes));
    }
  } catch (const std::exception& error) {
    failure = error_text(error);
  }
  const auto communicator = mesh.ndim() == 1 ? mesh.communicator(0) : mesh.flatten().communicator(0);
  throw_failures(failure, *communicator, mesh.device(), "fully_shard's memory");
  return memories;
}

} // namespace

std::vector<std::shared_ptr<ParameterGroup>> make_groups(const StatePtr& state, const FreeParameters& all,
                                                         const std::shared_ptr<ModelResources>& resources,
                                                         const CommunicatorPtr& neighbours) {
  const auto& axes = state->axes();
  const bool buckets = axes.strategy() == Strategy::kNoShard && axes.reduces();
  const auto bytes = buckets ? state->options().bucket_bytes : std::numeric_limits<int64_t>::max();
  std::vector<FreeParameters> parts;
  for (const auto& [begin, end] : bucket_ranges(all.values.empty() ? all.tensors : all.values, bytes))
    parts.push_back(part_of(all, begin, end));
  const auto memories = reserve_memory(state->options(), axes, parts);
  std::vector<std::shared_ptr<ParameterGroup>> groups;
  for (size_t i = 0; i < parts.size(); ++i) {
    groups.push_back(make_group(i == 0 ? state : state->add_bucket(), parts[i], resources, memories[i]));
    if (neighbours) groups.back()->set_neighbours(neighbours);
  }
  if (!memories.empty() && memories[0]) release_freed_memory();
  return groups;
}

namespace {

/// The free parameters of a call, and their names for errors.
struct Taken {
  FreeParameters parameters;
  std::vector<std::string> names;
  std::exception_ptr thrown; ///< by shard_placement_fn or gather_extension_fn
};

/// What extends the gather of each parameter, and a line for each that has something; none where nothing does.
std::vector<std::shared_ptr<GatherExtension>> choose_extensions(const std::vector<at::Tensor>& tensors,
                                                                const std::vector<std::string>& names,
                                                                const FullyShardOptions& options, std::string& description,
                                                                std::exception_ptr& thrown) {
  std::vector<std::shared_ptr<GatherExtension>> extensions(tensors.size());
  for (size_t i = 0; options.gather_extension_fn && !thrown && i < tensors.size(); ++i) {
    try {
      extensions[i] = options.gather_extension_fn(names[i], tensors[i]);
      TORCH_CHECK_VALUE(!extensions[i] || tensors[i].dim() > 0, "fully_shard: the parameter ", names[i],
                        " has no dims, so that nothing is gathered of it, but gather_extension_fn gave it an extension");
      if (extensions[i]) description += fmt::format("\n{} gathered by an extension", names[i]);
    } catch (...) {
      thrown = std::current_exception();
      description += fmt::format("\ngather_extension_fn threw for {}: {}", names[i], summary_of(thrown));
    }
  }
  const bool extends = std::any_of(extensions.begin(), extensions.end(), [](const auto& each) { return each != nullptr; });
  return extends ? extensions : std::vector<std::shared_ptr<GatherExtension>>();
}

void check_extensions(const Taken& taken, const MeshAxes& axes, const CommunicatorPtr& neighbours) {
  if (taken.parameters.extensions.empty()) return;
  TORCH_CHECK_VALUE(axes.strategy() != Strategy::kNoShard,
                    "fully_shard: gather_extension_fn gave an extension, but the strategy no-shard gathers no parameter");
  TORCH_CHECK_VALUE(!neighbours,
                    "fully_shard: gather_extension_fn gave an extension, but reshard_after_forward is a number of "
                    "ranks, which gather parts of unsharded parameters: choose true or false");
}

/// What the program chose for them is added to `description`.
Taken take_free(const Census& census, const FullyShardOptions& options, std::string& description) {
  Taken taken;
  auto& [tensors, places, dtypes, placements, values, extensions] = taken.parameters;
  for (const auto& [tensor, visit, key] : census.free) {
    tensors.push_back(tensor);
    places.push_back(census.walk.place_of(*visit, key));
    taken.names.push_back(census.walk.name(places.back()));
    check_parameter(tensor, taken.names.back(), tensors[0]);
  }
  check_own_memory(census);
  dtypes = unsharded_dtypes(census.walk, tensors, options.mixed_precision);
  placements = choose_placements(tensors, taken.names, options.shard_placement_fn, description, taken.thrown);
  extensions = choose_extensions(tensors, taken.names, options, description, taken.thrown);
  return taken;
}

WeightAgreement agree(const Taken& taken, const DeviceMesh& mesh, InitialWeights mode, const std::string& name,
                      const std::string& description, int64_t model_number) {
  const auto ask = [&] {
    return agree_on_initial_weights(taken.parameters.tensors, taken.names, mesh, mode, "fully_shard of " + name, description,
                                    model_number);
  };
  if (!taken.thrown) return ask();
  try {
    ask();
  } catch (const std::exception&) {
    // It says what this rank's exception is, to the ranks that have none.
  }
  std::rethrow_exception(taken.thrown);
}

void check_call(const std::vector<Module*>& modules, const Census& census, const FullyShardOptions& options) {
  TORCH_CHECK_VALUE(!census.free.empty() || !census.roots.empty(), "fully_shard: the module ", describe(modules),
                    " has no parameter", census.ignored.empty() ? "" : " but ignored ones");
  check_not_sharded(modules, census);
  check_policy(options.mixed_precision);
  check_buckets(options);
}

/// Shards the parameters, and puts the models below under `state`.
void make_model(const StatePtr& state, const Census& census, const FreeParameters& all, const CommunicatorPtr& neighbours) {
  const auto schedule = std::make_shared<Schedule>(state->axes().mesh().device());
  state->settle(schedule); // a read finds it, whatever fails from here on
  try {
    make_groups(state, all, schedule->resources(), neighbours);
    adopt_below(state, census);
    state->settle(schedule);
  } catch (...) { // some parameters may be sharded, and others not
    schedule->refuse("the model cannot be used any more, because fully_shard failed amid its changes: " +
                     error_text(std::current_exception()));
    throw;
  }
}

FSDPModule shard_modules(const std::vector<Module*>& modules, const DeviceMesh& mesh, const FullyShardOptions& options) {
  check_mesh(mesh);
  const KeepViewReplay keep;
  const auto strategy = options.strategy ? *options.strategy : default_strategy(mesh);
  const auto census = take_census(modules, options.ignored_params);
  check_call(modules, census, options);
  auto description = describe(strategy, mesh, options) + describe(census, mesh);
  const auto taken = take_free(census, options, description);
  const auto& all = taken.parameters;
  const auto& names = taken.names;
  const std::string name = describe(modules);
  const auto agreement = agree(taken, mesh, options.initial_weights, name, description, next_number(census));
  check_norms(census.walk, all.tensors, all.dtypes); // of the same options on all ranks

  const MeshAxes axes(strategy, mesh, options.communicators); // connects the ranks along its dims: they agree on them now
  check_placements(all, names, axes);
  const auto neighbours = connect_neighbours(axes, options.reshard_after_forward);
  check_extensions(taken, axes, neighbours);
  auto state =
      std::make_shared<ShardedModule>(std::vector<const Module*>(modules.begin(), modules.end()), name, axes, kept_of(options));
  for (const auto& item : census.ignored) state->ignore(item.tensor);
  state->initial_checksum = agreement.checksum;
  state->model_number = agreement.model_number;
  const auto below = roots_below(census);
  for (const auto& root : below) close(*root);
  move_buffers(census.buffers, mesh.device());
  if (all.tensors.empty() && below.empty()) {
    const auto* meta = parameter_meta(census.sharded[0].tensor);
    module_of(*meta->group).of_modules().keep_beside(state);
  } else {
    make_model(state, census, all, neighbours);
  }
  return FSDPModule(state);
}

DeviceMesh mesh_of_the_world() {
  return init_device_mesh(torch::cuda::is_available() ? at::kCUDA : at::kCPU, {process_context().world_size()});
}

std::vector<Module*> addresses_of(const std::vector<std::shared_ptr<Module>>& modules) {
  TORCH_CHECK_VALUE(!modules.empty(), "fully_shard: the list of modules is empty");
  std::vector<Module*> pointers;
  for (const auto& module : modules) {
    TORCH_CHECK_VALUE(module, "fully_shard: module ", pointers.size(), " of the list is null");
    pointers.push_back(module.get());
  }
  return pointers;
}

StatePtr find_state(const Module& module) {
  StatePtr found;
  any_parameter(module, [&](const at::Tensor& parameter) {
    const auto* meta = parameter_meta(parameter);
    for (auto* at = meta ? &module_of(*meta->group) : nullptr; at && !found; at = at->parent().get())
      found = at->state_of(&module);
    return found != nullptr;
  });
  return found;
}

} // namespace

} // namespace internal

FSDPModule fully_shard(Module& module, const DeviceMesh& mesh, const FullyShardOptions& options) {
  return internal::shard_modules({&module}, mesh, options);
}

FSDPModule fully_shard(const std::vector<std::shared_ptr<Module>>& modules, const DeviceMesh& mesh,
                       const FullyShardOptions& options) {
  return internal::shard_modules(internal::addresses_of(modules), mesh, options);
}

FSDPModule replicate(Module& module, const DeviceMesh& mesh, const FullyShardOptions& options) {
  auto replicated = options;
  TORCH_CHECK_VALUE(!options.strategy || options.strategy == Strategy::kNoShard, "replicate: the options ask for the strategy ",
                    row_of(*options.strategy).name, "; call fully_shard for it");
  replicated.strategy = Strategy::kNoShard;
  return internal::shard_modules({&module}, mesh, replicated);
}

FSDPModule fully_shard(Module& module, const FullyShardOptions& options) {
  return fully_shard(module, internal::mesh_of_the_world(), options);
}

FSDPModule fully_shard(const std::vector<std::shared_ptr<Module>>& modules, const FullyShardOptions& options) {
  return fully_shard(modules, internal::mesh_of_the_world(), options);
}

FSDPModule replicate(Module& module, const FullyShardOptions& options) {
  return replicate(module, internal::mesh_of_the_world(), options);
}

FSDPModule fsdp(const Module& module) {
  auto state = internal::find_state(module);
  TORCH_CHECK_VALUE(state, "the module ", module.name(), " is not sharded: call fully_shard on it first");
  return FSDPModule(std::move(state));
}

bool is_sharded(const Module& module) { return internal::find_state(module) != nullptr; }

} // namespace tessera
