#include <tessera/fsdp/fully_shard.h>

#include <c10/core/InferenceMode.h>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/cuda.h>

#include <absl/container/flat_hash_set.h>
#include <algorithm>
#include <exception>
#include <span>
#include <tuple>
#include <utility>

#include <tessera/base/error_text.h>
#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/tensor/view_replay.h>
#include <tessera/fsdp/gradients/gradient_layout.h>
#include <tessera/fsdp/group/expert_mark.h>
#include <tessera/fsdp/group/parallel_parameter.h>
#include <tessera/fsdp/group/parameter_group.h>
#include <tessera/fsdp/model/module_walk.h>
#include <tessera/fsdp/model/sharded_module.h>
#include <tessera/fsdp/setup/census.h>
#include <tessera/fsdp/setup/group_making.h>
#include <tessera/fsdp/setup/initial_weights.h>
#include <tessera/fsdp/setup/mesh_parts.h>
#include <tessera/fsdp/setup/unsharded_dtypes.h>

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

void check_not_sharded(const std::vector<Module*>& modules, const Census& census) {
  for (const auto& root : census.roots) {
    for (const auto* module : modules) {
      const auto claim = root->model().claim_on(module);
      TORCH_CHECK_VALUE(claim != ShardedModel::Claim::kHeld, "fully_shard: the module ", module->name(), " is sharded already");
      TORCH_CHECK_VALUE(claim == ShardedModel::Claim::kNone, "fully_shard: the parameters of ", module->name(),
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
  const auto check = [](const char* name, int64_t bytes) {
    TORCH_CHECK_VALUE(bytes > 0, "fully_shard: ", name, " is ", bytes, ", but must be positive");
  };
  check("bucket_bytes", options.bucket_bytes);
  check("first_bucket_bytes", options.first_bucket_bytes.value_or(1));
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

const char* describe(const OffloadPolicy& policy) {
  using Memory = OffloadPolicy::Memory;
  return policy.memory == Memory::kFiles ? "to files" : policy.memory == Memory::kHost ? "to the host" : "unset";
}

std::string text_of_gather(const std::optional<QuantizedGather>& gather) {
  if (!gather) return "plain";
  return fmt::format("{} in blocks of {}, from {} elements on", to_string(gather->codec.wire), gather->codec.block,
                     gather->smallest);
}

/// What every rank must ask for alike.
std::string describe(Strategy strategy, const DeviceMesh& mesh, const FullyShardOptions& options) {
  const auto dtype = [](const std::optional<at::ScalarType>& type) { return type ? c10::toString(*type) : "unset"; };
  const auto& policy = options.mixed_precision;
  return fmt::format(
      "the strategy {} over {} ranks, the layout {}, reshard_after_forward {}, param_dtype {}, reduce_dtype {}, keep_in_fp32 "
      "[{}], "
      "initial_weights {}, bucket_bytes {} and {}, communicators {}, offload {}, gathers {}, reductions {}",
      row_of(strategy).name, fmt::join(mesh.shape(), " x "),
      options.layout == BufferLayout::kRagged ? "kRagged" : "kPerParameter",
      text_of_reshard_after_forward(options.reshard_after_forward), dtype(policy.param_dtype), dtype(policy.reduce_dtype),
      fmt::join(policy.keep_in_fp32, ", "), static_cast<int>(options.initial_weights), options.bucket_bytes,
      options.first_bucket_bytes.value_or(options.bucket_bytes),
      options.communicators == CommunicatorUse::kShared ? "kShared" : "kSeparate", describe(options.offload),
      text_of_gather(options.communication.gather),
      options.communication.reduction ? options.communication.reduction->description() : "plain");
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

/// The most ranks of a mesh in a model.
int64_t widest_mesh(ShardedModule& root) {
  int64_t ranks = 1;
  for (const auto& state : root.subtree()) ranks = std::max(ranks, state->roles().mesh().size());
  return ranks;
}

/// For the model that a call makes or completes: one number from its first call to its last. That of the widest model below it,
/// as experts may lie on more ranks than the call's, which have agreed on theirs alone.
int64_t next_number(const std::vector<StatePtr>& below) {
  int64_t number = process_context().next_number(), widest = 0;
  for (const auto& root : below) {
    const auto ranks = widest_mesh(*root), other = root->model().number;
    if (other == 0 || ranks < widest) continue;
    number = ranks > widest ? other : std::min(number, other);
    widest = ranks;
  }
  return number;
}

/// Clears what a failed backward has left, and frees what is gathered, before another schedule takes over.
void close(ShardedModule& root) {
  root.schedule()->forget_failed_backward();
  for (const auto& group : root.subtree_groups()) root.schedule()->reshard(*group);
}

/// Takes the models made by earlier calls under `state`.
void adopt_below(const StatePtr& state, const ModuleWalk& walk, const std::vector<StatePtr>& below) {
  for (const auto& root : below) {
    std::vector<Place> places;
    for (const auto* module : root->modules()) {
      places.push_back(walk.is_below(module) ? walk.place_of(walk.visit_of(module)) : Place{0, std::to_string(places.size())});
    }
    state->adopt(root, std::move(places));
  }
  for (const auto& visit : walk.visits()) {
    if (!visit.is_top()) state->model().claim(visit.module, ShardedModel::Claim::kBelow);
  }
}

/// Without what the call alone needs. The state knows the ignored parameters, and must not keep their memory.
FullyShardOptions kept_of(FullyShardOptions options) {
  options.ignored_params.clear();
  options.shard_placement_fn = nullptr;
  options.gather_extension_fn = nullptr;
  if (options.communication.gather) options.communication.gather->takes = nullptr;
  return options;
}

/// The free parameters of a call, and their names for errors.
struct Taken {
  std::vector<FreeParameter> parameters;
  std::vector<std::string> names;
  std::vector<MeshPart> parts; ///< of all parameters, unless something was thrown
  std::exception_ptr thrown;   ///< by shard_placement_fn or gather_extension_fn
};

/// One member of each.
template <typename Member>
std::vector<Member> column(const std::vector<FreeParameter>& parameters, Member FreeParameter::*member) {
  std::vector<Member> values;
  for (const auto& parameter : parameters) values.push_back(parameter.*member);
  return values;
}

/// The first line of what an exception says.
std::string summary_of(const std::exception_ptr& thrown) {
  const auto text = error_text(thrown);
  return text.substr(0, text.find('\n'));
}

/// Has the program's `function` choose for each parameter: `ask` says what, for a line on which all ranks must agree; nothing for
/// nothing. Where it throws on some ranks, the others would wait for these: the exception is a line as well.
template <typename Ask> // std::string(FreeParameter&, const std::string& name)
void ask_each(const char* function, Taken& taken, std::string& description, const Ask& ask) {
  for (size_t i = 0; !taken.thrown && i < taken.names.size(); ++i) {
    const auto& name = taken.names[i];
    try {
      const std::string choice = ask(taken.parameters[i], name);
      if (!choice.empty() && !taken.parameters[i].mesh.defined()) // of experts the ranks may have others
        description += fmt::format("\n{} {}", name, choice);
    } catch (...) {
      taken.thrown = std::current_exception();
      description += fmt::format("\n{} threw for {}: {}", function, name, summary_of(taken.thrown));
    }
  }
}

void check_chosen_mesh(const DeviceMesh& chosen, const std::string& name, const DeviceMesh& mesh) {
  const auto check = [&](bool holds, const auto&... problem) {
    TORCH_CHECK_VALUE(holds, "fully_shard: shard_placement_fn chose ", chosen.to_string(), " for ", name, ", ", problem...);
  };
  check(chosen.coordinate().has_value(), "which rank ", process_context().rank(), " is outside of");
  check(chosen.device_type() == mesh.device_type(), "which is of another device type than ", mesh.to_string());
}

void choose_placements(const ShardPlacementFn& choose, const CallMesh& call, Taken& taken, std::string& description) {
  if (!choose) return;
  ask_each("shard_placement_fn", taken, description, [&](FreeParameter& parameter, const std::string& name) {
    auto chosen = choose(name, parameter.tensor);
    parameter.placement = std::move(chosen.placement);
    if (chosen.mesh.defined() && !(chosen.mesh == call.given) && !(chosen.mesh == call.data_parallel)) {
      check_chosen_mesh(chosen.mesh, name, call.given);
      parameter.mesh = std::move(chosen.mesh);
    }
    return parameter.placement ? "placed " + to_string(*parameter.placement) : "";
  });
}

void choose_extensions(const GatherExtensionFn& choose, Taken& taken, std::string& description) {
  if (!choose) return;
  ask_each("gather_extension_fn", taken, description, [&](FreeParameter& parameter, const std::string& name) {
    parameter.extension = choose(name, parameter.tensor);
    TORCH_CHECK_VALUE(!parameter.extension || !parameter.parallel, "fully_shard: the parameter ", name,
                      " is a DTensor over other dims of the mesh, of which no extension can gather the parts, but "
                      "gather_extension_fn gave it one");
    const bool is_whole = parameter.placement && is_replicate(*parameter.placement);
    TORCH_CHECK_VALUE(!parameter.extension || (parameter.tensor.dim() > 0 && !is_whole), "fully_shard: the parameter ", name,
                      is_whole ? " is Replicate" : " has no dims",
                      ", so that nothing is gathered of it, but gather_extension_fn gave it an extension");
    return std::string(parameter.extension ? "gathered by an extension" : "");
  });
}

/// Whether `gather` is for the parameter.
bool takes(const QuantizedGather& gather, const std::string& name, const FreeParameter& parameter) {
  const auto& tensor = parameter.tensor;
  if (!at::isFloatingType(parameter.dtype) || tensor.dim() == 0 || c10::elementSize(parameter.dtype) == 1) return false;
  if (parameter.placement && is_replicate(*parameter.placement)) return false; // nothing is gathered of it
  if (gather.takes) return gather.takes(name, tensor);
  return tensor.dim() > 1 && tensor.numel() >= gather.smallest;
}

void choose_quantized(const std::optional<QuantizedGather>& gather, Taken& taken, std::string& description) {
  if (!gather) return;
  ask_each("the quantized gather's takes", taken, description, [&](FreeParameter& parameter, const std::string& name) {
    parameter.is_quantized = !parameter.extension && takes(*gather, name, parameter);
    return std::string(parameter.is_quantized ? "gathered in fewer bits" : "");
  });
}

/// Errors for what cannot be sent in fewer bits.
void check_communication(const Communication& communication, const Taken& taken) {
  if (taken.parameters.empty()) return;
  for (const auto& part : taken.parts) {
    if (communication.reduction) communication.reduction->check(reduction_stages_of(*part.roles, part.stages));
  }
  const auto none_is = [&](const auto& holds) { return std::none_of(taken.parameters.begin(), taken.parameters.end(), holds); };
  if (communication.gather) {
    const auto gathers = [](const MeshPart& part) { return part.roles->shards(); };
    check_codec(communication.gather->codec, "fully_shard: the quantized gather");
    TORCH_CHECK_VALUE(communication.gather->smallest >= 0, "fully_shard: smallest of the quantized gather is ",
                      communication.gather->smallest, ", but cannot be negative");
    TORCH_CHECK_VALUE(std::any_of(taken.parts.begin(), taken.parts.end(), gathers),
                      "fully_shard: the options ask for a quantized gather, but the strategy ",
                      row_of(taken.parts[0].roles->strategy()).name, " gathers no parameter");
  }
  TORCH_CHECK_VALUE((!communication.gather && !communication.reduction) ||
                        !none_is([](const auto& each) { return at::isFloatingType(each.dtype); }),
                    "fully_shard: the options ask for communication in fewer bits, but no parameter of the call (",
                    taken.names[0], ", of ", taken.parameters[0].dtype, ", ...) has floating-point numbers");
  for (size_t i = 0; communication.reduction && i < taken.names.size(); ++i) {
    TORCH_CHECK_VALUE(!at::isComplexType(taken.parameters[i].dtype), "fully_shard: the options ask for reductions by policy (",
                      communication.reduction->description(), "), but the parameter ", taken.names[i], " is of ",
                      taken.parameters[i].dtype);
  }
}

void check_placements(const MeshPart& part) {
  for (size_t i = 0; i < part.names.size(); ++i) {
    const auto& parameter = part.parameters[i];
    const bool is_whole = parameter.placement && is_replicate(*parameter.placement);
    TORCH_CHECK_VALUE(!parameter.placement || is_whole || part.roles->shards(), "fully_shard: shard_placement_fn chose ",
                      to_string(*parameter.placement), " for ", part.names[i], ", but the strategy ",
                      row_of(part.roles->strategy()).name, " splits no parameter");
    const bool is_split = parameter.parallel && !parameter.parallel->is_replicated();
    TORCH_CHECK_VALUE(!is_split || !parameter.placement || is_whole || std::holds_alternative<Shard>(*parameter.placement),
                      "fully_shard: shard_placement_fn chose ", to_string(*parameter.placement), " for ", part.names[i],
                      ", which is a DTensor that other dims of the mesh split, ", parameter.parallel->to_string(),
                      ": choose Shard or Replicate");
    check_placement({part.names[i], parameter.values().sizes().vec(), parameter.dtype, parameter.placement},
                    part.roles->shard_ranks());
  }
}

void check_extensions(const MeshPart& part) {
  const auto extends = [](const FreeParameter& each) { return each.extension != nullptr; };
  if (std::none_of(part.parameters.begin(), part.parameters.end(), extends)) return;
  TORCH_CHECK_VALUE(part.roles->shards(), "fully_shard: gather_extension_fn gave an extension, but the strategy ",
                    row_of(part.roles->strategy()).name, " gathers no parameter");
  TORCH_CHECK_VALUE(!part.stages.has_after_forward(),
                    "fully_shard: gather_extension_fn gave an extension, but reshard_after_forward is a number of "
                    "ranks, which gather parts of unsharded parameters: choose true or false");
}

/// Of a DTensor over other dims of the mesh its part is sharded.
void take_part(FreeParameter& parameter, const std::string& name, std::string& description) {
  const auto* meta = dtensor_meta(parameter.tensor);
  if (!meta) return;
  parameter.value = meta->local.contiguous();
  parameter.parallel = spec_in_forward(*meta->spec, parameter.dtype);
  if (const auto* read = read_meta(parameter.tensor)) parameter.mark = read->mark();
  if (parameter.mesh.defined()) return;
  description += fmt::format("\n{} a DTensor [{}] {} over {} ranks{}", name, fmt::join(meta->spec->sizes(), ", "),
                             to_string(meta->spec->placements()), fmt::join(meta->spec->mesh().shape(), " x "),
                             parameter.tensor.requires_grad() ? "" : ", frozen");
}

/// What the program chose for them is added to `description`.
Taken take_free(const Census& census, const CallMesh& call, const FullyShardOptions& options, std::string& description) {
  Taken taken;
  for (const auto& [tensor, visit, key] : census.free) {
    taken.parameters.push_back({.tensor = tensor, .place = census.walk.place_of(*visit, key)});
    taken.names.push_back(census.walk.name(taken.parameters.back().place));
  }
  choose_placements(options.shard_placement_fn, call, taken, description);
  for (size_t i = 0; i < taken.names.size(); ++i) {
    const auto& [tensor, own_mesh] = std::tie(taken.parameters[i].tensor, taken.parameters[i].mesh);
    const auto& mesh = own_mesh.defined() ? own_mesh : call.data_parallel;
    check_expert(tensor, taken.names[i], mesh);
    check_parameter(tensor, taken.names[i], taken.parameters[0].tensor, mesh);
  }
  check_own_memory(census);
  const auto dtypes = unsharded_dtypes(census.walk, column(taken.parameters, &FreeParameter::tensor), options.mixed_precision);
  for (size_t i = 0; i < dtypes.size(); ++i) {
    taken.parameters[i].dtype = dtypes[i];
    take_part(taken.parameters[i], taken.names[i], description);
  }
  choose_extensions(options.gather_extension_fn, taken, description);
  choose_quantized(options.communication.gather, taken, description);
  if (!taken.thrown) taken.parts = split_by_mesh(taken.parameters, taken.names, call);
  for (const auto& part : taken.parts) {
    if (part.mesh.defined())
      description += fmt::format("\n{} parameters over {} other ranks", part.names.size(), fmt::join(part.mesh.shape(), " x "));
  }
  return taken;
}

/// The modules of models on other ranks than the mesh's: experts, of which those ranks may have others.
absl::flat_hash_set<const Module*> experts_of(const Census& census, const DeviceMesh& mesh) {
  absl::flat_hash_set<const Module*> experts;
  for (const auto& root : census.roots) {
    if (root->roles().mesh().rank_list() == mesh.rank_list()) continue;
    for (const auto* module : root->modules()) experts.insert(module);
  }
  return experts;
}

/// The buffers that a broadcast of the initial weights reaches.
std::vector<std::pair<std::string, at::Tensor>> plain_buffers(const Census& census, const DeviceMesh& mesh) {
  const auto experts = experts_of(census, mesh);
  const auto is_of_expert = [&](const ModuleWalk::Visit* visit) {
    while (!experts.contains(visit->module) && !visit->is_top()) visit = &census.walk.visits()[visit->above];
    return experts.contains(visit->module);
  };
  std::vector<std::pair<std::string, at::Tensor>> buffers;
  for (const auto& item : census.buffers) {
    const auto& tensor = item.tensor;
    const bool is_plain = tensor.defined() && tensor.layout() == at::kStrided && !dtensor_meta(tensor);
    if (is_plain && !is_of_expert(item.visit)) buffers.emplace_back(census.name_of(item), tensor);
  }
  return buffers;
}

WeightAgreement agree(const Taken& taken, const InitialWeightsCheck& check) {
  if (!taken.thrown) return agree_on_initial_weights(check);
  try {
    agree_on_initial_weights(check);
  } catch (const std::exception&) {
    // It says what this rank's exception is, to the ranks that have none.
  }
  std::rethrow_exception(taken.thrown);
}

void check_call(const std::vector<Module*>& modules, const Census& census, const FullyShardOptions& options) {
  TORCH_CHECK_VALUE(!census.free.empty() || !census.roots.empty(), "fully_shard: the module ", describe(modules),
                    " has no parameter", census.ignored.empty() ? "" : " but ignored ones", why_no_parameters(*modules.front()));
  check_not_sharded(modules, census);
  check_policy(options.mixed_precision);
  check_buckets(options);
}

/// Shards the parameters, and puts the models below under `state`.
void make_model(const StatePtr& state, const ModuleWalk& walk, const std::vector<StatePtr>& below,
                std::span<const MeshPart> parts) {
  const auto schedule = std::make_shared<Schedule>(state->roles().mesh().device());
  for (const auto& root : below) schedule->take_settings(*root->schedule());
  state->attach(schedule); // a read finds it, whatever fails from here on
  try {
    make_groups(state, parts, schedule->resources());
    adopt_below(state, walk, below);
    state->attach(schedule);
  } catch (...) { // some parameters may be sharded, and others not
    schedule->refuse("the model cannot be used any more, because fully_shard failed amid its changes: " +
                     error_text(std::current_exception()));
    throw;
  }
}

/// What the call met goes to `state`. Without parameters or models below, it stands beside the state that has its module's.
void take_over(const StatePtr& state, const Census& census, const std::vector<StatePtr>& below, std::span<const MeshPart> parts) {
  for (const auto& item : census.ignored) state->model().ignore(item.tensor);
  for (const auto& root : below) close(*root);
  move_buffers(census.buffers, state->roles().mesh().device());
  if (!parts.empty() || !below.empty()) return make_model(state, census.walk, below, parts);
  const auto* meta = parameter_meta(census.sharded[0].tensor);
  state_of_group(*meta->group).keep_beside(state);
}

/// Of parameters whose names the call made longer.
void word_storage_errors(ShardedModule& state) {
  for (const auto& group : state.subtree_groups()) {
    for (const auto& parameter : group->parameters()) {
      const at::Tensor tensor(parameter.tensor.lock());
      if (dtensor_meta(tensor)) word_storage_error(tensor);
    }
  }
}

/// The gradients of experts are divided otherwise than by the ranks that have them.
void divide_gradients(ShardedModule& state, const std::vector<MeshPart>& parts) {
  for (const auto& part : parts) {
    const auto* meta = part.divisor ? parameter_meta(part.parameters[0].tensor) : nullptr;
    if (!meta) continue;
    for_each_group(state, /*recurse=*/false, [&](GroupGradients& gradients) {
      if (&gradients.group() == meta->group) gradients.set_divide_factor(*part.divisor);
    });
  }
}

/// The handle of what was sharded, once nothing can fail any more.
FSDPModule finished(const StatePtr& state, const std::vector<Module*>& modules, const std::vector<MeshPart>& parts) {
  word_storage_errors(*state);
  for (const auto* module : modules) forget_compiled(*module);
  divide_gradients(*state, parts);
  return FSDPModule(state);
}

/// All ranks agree on the options by now.
void prepare_parts(Taken& taken, const CallMesh& call, const FullyShardOptions& options, const std::string& name) {
  agree_on_parts(taken.parts, call, options, name);
  for (const auto& part : taken.parts) check_placements(part);
  connect_parts(taken.parts, options);
  for (const auto& part : taken.parts) check_extensions(part);
  check_communication(options.communication, taken);
}

/// What the ranks of the call compare: all but what lies on other ranks.
InitialWeightsCheck weights_of(const Taken& taken, const DeviceMesh& mesh) {
  InitialWeightsCheck check{.mesh = mesh};
  for (size_t i = 0; i < taken.names.size(); ++i) {
    if (taken.parameters[i].mesh.defined()) continue;
    check.tensors.push_back(taken.parameters[i].values());
    check.names.push_back(taken.names[i]);
  }
  return check;
}

FSDPModule shard_modules(const std::vector<Module*>& modules, const DeviceMesh& given, const FullyShardOptions& options) {
  check_mesh(given);
  const KeepViewReplay keep;
  const auto& dims = options.data_parallel_dims;
  const auto strategy = options.strategy ? *options.strategy : default_strategy(given, dims);
  const CallMesh call{.given = given, .data_parallel = data_parallel_mesh(given, dims), .strategy = strategy};
  const auto& mesh = call.data_parallel;
  const auto census = take_census(modules, options.ignored_params);
  check_call(modules, census, options);
  const auto below = roots_below(census);
  auto description = describe(strategy, mesh, options) + describe(census, mesh);
  auto taken = take_free(census, call, options, description);
  const std::string name = describe(modules);
  auto weights = weights_of(taken, mesh);
  weights.buffers = plain_buffers(census, mesh);
  weights.mode = options.initial_weights;
  weights.call = "fully_shard of " + name;
  weights.options = description;
  weights.model_number = next_number(below);
  const auto agreement = agree(taken, weights);
  check_norms(census.walk, column(taken.parameters, &FreeParameter::tensor),
              column(taken.parameters, &FreeParameter::dtype)); // of the same options on all ranks

  const MeshRoles roles(given, strategy, dims);
  prepare_parts(taken, call, options, name);
  const std::vector<ModuleReference> held(modules.begin(), modules.end());
  auto state = std::make_shared<ShardedModule>(ShardingCall{held, name, roles, kept_of(options)});
  state->initial_checksum = agreement.checksum;
  state->model().number = agreement.model_number;
  take_over(state, census, below, taken.parts);
  return finished(state, modules, taken.parts);
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
