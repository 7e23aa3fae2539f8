#include <absl/algorithm/container.h>

#include <algorithm>
#include <exception>

#include <tessera/dtensor/calls/list_positions.h>
#include <tessera/dtensor/calls/planned_meshes.h>
#include <tessera/dtensor/calls/visit_tensors.h>
#include <tessera/dtensor/layout/sharding_math.h>
#include <tessera/dtensor/plan/plan.h>
#include <tessera/dtensor/redistribute/redistribute.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/mesh/part_order.h>

namespace tessera::internal::dispatch {

namespace {

using rules::OpCall;
using rules::TensorArg;
using rules::Trait;

struct GivenTensor : TensorArg {
  bool plain = false;
};

/// All tensor arguments, out= ones included, lists spread.
struct Collected {
  std::vector<GivenTensor> tensors;
  DeviceMesh mesh;
};

void add_tensor(const c10::IValue& value, size_t argument, int64_t index, Collected& all) {
  GivenTensor entry{{argument, index, false, {}, at::kFloat, nullptr}};
  if (value.isTensor() && value.toTensor().defined()) {
    const auto& tensor = value.toTensor();
    entry.defined = true;
    entry.sizes = tensor.sizes().vec();
    entry.dtype = tensor.scalar_type();
    if (const auto* meta = dtensor_meta(tensor)) {
      entry.spec = meta->spec;
      all.mesh = meta->spec->mesh();
    } else {
      entry.plain = true;
    }
  }
  all.tensors.push_back(std::move(entry));
}

void check_one_mesh(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments) {
  const DTensorMeta* first = nullptr;
  visit_tensors(info, arguments, [&](const at::Tensor& tensor, size_t) {
    const auto* meta = dtensor_meta(tensor);
    if (!first) first = meta;
    TORCH_CHECK(!meta || meta->spec->mesh() == first->spec->mesh(), info.name,
                ": the arguments lie on different meshes: ", description_of(*first),
                first->provenance.name ? " on " + first->spec->mesh().to_string() : "", " and ", description_of(*meta),
                meta->provenance.name ? " on " + meta->spec->mesh().to_string() : "",
                ". Move one with redistribute(mesh, placements), where both have the same ranks, or take the whole of each: "
                "full_tensor(), and tessera::unsharded() of a sharded parameter");
  });
}

Collected collect(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments) {
  check_one_mesh(info, arguments);
  Collected all;
  for (size_t i = 0; i < info.arguments.size(); ++i) {
    const auto& value = arguments[i];
    if (info.arguments[i].kind == ArgKind::kTensor) {
      add_tensor(value, i, -1, all);
    } else if (info.arguments[i].kind == ArgKind::kTensorList && !value.isNone()) {
      const auto list = value.toListRef();
      for (size_t k = 0; k < list.size(); ++k) add_tensor(list[k], i, static_cast<int64_t>(k), all);
    }
  }
  TORCH_INTERNAL_ASSERT(all.mesh.defined(), info.name, " reached the DTensor fallback without a DTensor");
  const Placements replicated(all.mesh.ndim());
  for (auto& tensor : all.tensors) {
    if (tensor.plain) tensor.spec = Spec::intern(all.mesh, replicated, tensor.sizes, tensor.dtype);
  }
  return all;
}

bool has_empty(const Collected& all) {
  return std::any_of(all.tensors.begin(), all.tensors.end(),
                     [](const GivenTensor& tensor) { return tensor.spec && tensor.spec->numel() == 0; });
}

/// The length of the longest list.
int64_t list_length(const Collected& all, const OpInfo& info) {
  int64_t last = -1;
  for (const auto& tensor : all.tensors) {
    if (!info.arguments[tensor.argument].out) last = std::max(last, tensor.index);
  }
  return last + 1;
}

/// The plans of several lists of outputs come position by position; the operator returns list by list.
void order_by_list(std::vector<rules::OutputPlan>& outputs, size_t positions) {
  std::vector<rules::OutputPlan> ordered;
  ordered.reserve(outputs.size());
  const size_t lists = positions == 0 ? 0 : outputs.size() / positions;
  for (size_t list = 0; list < lists; ++list) {
    for (size_t k = 0; k < positions; ++k) ordered.push_back(std::move(outputs[k * lists + list]));
  }
  outputs = std::move(ordered);
}

/// Gives `call` the tensors of one list position, all of them for `position` < 0.
Bounds select_tensors(const OpInfo& info, const Collected& all, int64_t position, const CallSite& site, OpCall& call) {
  Bounds bounds{{}, std::vector<OutputBound>(info.returns.size())};
  call.tensors.clear();
  for (size_t i = 0; i < all.tensors.size(); ++i) {
    const auto& tensor = all.tensors[i];
    const auto& argument = info.arguments[tensor.argument];
    const bool left_out = argument.out || (position >= 0 && tensor.index >= 0 && tensor.index != position);
    const bool may_move = !left_out && site.own_temporaries() && !site.shares_written() && tensor.index < 0 && tensor.spec;
    const auto index = static_cast<int>(call.tensors.size());
    for (size_t r = 0; r < info.returns.size(); ++r) {
      if (info.returns[r].written_argument != static_cast<int>(tensor.argument) || !tensor.spec) continue;
      bounds.outputs[r] = {may_move ? nullptr : &tensor.spec->placements(), left_out ? -1 : index};
    }
    if (left_out) continue;
    call.tensors.push_back(tensor);
    bounds.inputs.push_back({i, argument.written && !may_move ? InputHold::kFixed : InputHold::kFree});
  }
  return bounds;
}

/// An operator that only writes: the first tensor that it writes is its result, and keeps its placement.
void take_written_as_result(const OpCall& call, rules::Factorization& factors, Bounds& bounds) {
  const auto written =
      absl::c_find_if(bounds.inputs, [](const auto& input) { return input.hold == InputHold::kFixed; }) - bounds.inputs.begin();
  if (written == std::ssize(bounds.inputs) || !call.tensors[written].spec) return;
  factors.outputs.assign(1, factors.inputs[written]);
  bounds.outputs.assign(1, {&call.tensors[written].spec->placements(), static_cast<int>(written)});
}

/// Tensors that are written in place are so elsewhere, and what they become goes back to where they lie.
void let_written_move(Bounds& bounds) {
  for (auto& input : bounds.inputs) {
    if (input.hold == InputHold::kFixed) input.hold = InputHold::kReturns;
  }
  for (auto& output : bounds.outputs) {
    if (output.tied >= 0) output.fixed = nullptr;
  }
}

/// Chooses placements that leave what is written where it lies, or else moves it there and back.
CallPlacements choose_placements(const OpCall& call, const rules::Factorization& factors, Bounds& bounds) {
  if (auto chosen = propagate(call, factors, bounds)) return std::move(*chosen);
  let_written_move(bounds);
  auto chosen = propagate(call, factors, bounds);
  TORCH_CHECK(chosen, call.name,
              ": the written tensor would have to change its placement, which an out= argument cannot. Use the operator that "
              "returns a new tensor, and copy_ its result into that argument; ",
              describe(call));
  return std::move(*chosen);
}

/// How inputs are stretched.
std::shared_ptr<const Stretch> stretch_of(const OpCall& call, const CallPlacements& chosen) {
  const auto& [inputs, over, mesh_dim] = chosen.stretching;
  if (inputs == rules::IndexSet{} || !call.mesh.coordinate()) return nullptr;
  const auto& ragged = std::get<RaggedShard>(chosen.inputs[over][mesh_dim]);
  const auto& mesh = call.mesh;
  Stretch stretch{view_without(call.tensors[over].sizes, mesh.shape(), *mesh.coordinate(), chosen.inputs[over], {mesh_dim}).sizes,
                  ragged.dim};
  stretch.part = ragged_extent(cut_at(ragged, stretch.sizes), mesh.local_rank(static_cast<int64_t>(mesh_dim)));
  std::fill(stretch.sizes.begin() + ragged.dim + 1, stretch.sizes.end(), -1);
  return std::make_shared<const Stretch>(std::move(stretch));
}

void enter_inputs(const OpCall& call, const Bounds& bounds, const CallPlacements& chosen, Plan& plan) {
  const auto stretch = stretch_of(call, chosen);
  for (size_t i = 0; i < bounds.inputs.size(); ++i) {
    const auto& spec = call.tensors[i].spec;
    if (!spec) continue;
    const auto target = spec->placements() == chosen.inputs[i] ? spec : spec->with(chosen.inputs[i]);
    auto& input = plan.inputs[bounds.inputs[i].position];
    auto& input_spec = plan.input_specs[bounds.inputs[i].position];
    TORCH_CHECK(!input_spec || input_spec == target, call.name, ": one tensor would need several placements at once; ",
                describe(call));
    input_spec = target;
    const auto hold = bounds.inputs[i].hold;
    if (chosen.stretching.inputs.contains(i)) input.stretch = stretch;
    input.moves = target != spec && !same_local(*spec, *target);
    input.returns = hold == InputHold::kReturns && input.moves;
    if (target != spec && (input.moves || hold != InputHold::kReturns)) input.target = target;
    input.joins_norm = spec->is_replicated() && absl::c_any_of(target->placements(), is_norm);
  }
}

/// Channels last where an input is, image or weight, as kernels choose; what this rank's part looks like may differ between
/// ranks.
at::MemoryFormat format_of_results(const OpCall& call) {
  for (const auto& tensor : call.tensors) {
    if (!tensor.spec || tensor.sizes.size() != call.tensors[0].sizes.size()) continue;
    const c10::IntArrayRef sizes(tensor.spec->sizes()), strides(tensor.spec->strides());
    if (sizes.size() == 4 && c10::is_channels_last_strides_2d(sizes, strides)) return at::MemoryFormat::ChannelsLast;
    if (sizes.size() == 5 && c10::is_channels_last_strides_3d(sizes, strides)) return at::MemoryFormat::ChannelsLast3d;
  }
  return at::MemoryFormat::Contiguous;
}

void enter_outputs(const OpCall& call, const rules::Factorization& factors, const CallPlacements& chosen, Plan& plan) {
  plan.wrapping = factors.wrapping;
  for (size_t r = 0; r < factors.outputs.size(); ++r) {
    rules::OutputPlan output{chosen.outputs[r], factors.outputs[r].sizes};
    output.dtype = call.tensors.empty() ? at::kFloat : call.tensors[0].dtype;
    if (r == 0 && !factors.strides.empty()) output.strides = factors.strides;
    const bool as_input = r == 0 && !call.tensors.empty() && output.sizes.size() == call.tensors[0].sizes.size();
    if (as_input) output.format = format_of_results(call);
    plan.outputs.push_back(std::move(output));
  }
}

/// Operators along a sequence that `split_sequence` split are errors: a rank's positions are no neighbours, and the whole is
/// what no rank was to hold. One of the program's plain tensors would be cut as if they were.
void check_split_sequences(const OpInfo& info, const OpCall& call, const Bounds& bounds, const CallPlacements& chosen,
                           const Plan& plan) {
  const auto part = part_dim(call.mesh);
  if (C10_LIKELY(!part)) return;
  const auto dim = static_cast<size_t>(part->dim);
  const auto check = [&](bool holds, const char* problem) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        holds, call.name, ": ", problem, " under context parallelism, where each rank of ", call.mesh.to_string(),
        " has a part of every sequence. merge_sequence gives the whole, and to_local this rank's part; ", describe(call));
  };
  bool is_split = false;
  for (size_t i = 0; i < bounds.inputs.size(); ++i) {
    if (!call.tensors[i].spec) continue;
    const auto &from = call.tensors[i].spec->placements()[dim], &to = chosen.inputs[i][dim];
    const auto& input = plan.inputs[bounds.inputs[i].position];
    is_split |= is_sharded(from) && call.mesh.size(part->dim) > 1;
    check(from == to || !is_sharded(from) || !input.moves, "the operator needs whole sequences");
    const bool is_cut = input.source && input.moves && is_replicate(from) && is_sharded(to);
    check(!is_cut || part->layout == PartLayout{} || !replicates_plain_tensors(),
          "a plain tensor of the whole sequence is used; make its part with split_sequence, or of its positions");
  }
  for (const auto& output : chosen.outputs) {
    const bool is_one_ranks = std::holds_alternative<RaggedShard>(output[dim]) || (info.views && is_partial(output[dim]));
    check(!is_split || !is_one_ranks, "the operator takes some positions of a sequence");
  }
}

/// Runs the rule on the tensors of one list position (all of them for `position` < 0) and enters the result in `plan`.
void plan_part(const OpInfo& info, const Collected& all, OpCall& call, int64_t position, const CallSite& site, Plan& plan) {
  auto bounds = select_tensors(info, all, position, site, call);
  const auto& rule = std::get<rules::OnLocals>(*info.rule);
  auto factors = rule.factorize(call);
  bounds.kernel = rule.kind;
  bounds.keeps_signs = site.keeps_signs();
  TORCH_INTERNAL_ASSERT(factors.inputs.size() == call.tensors.size(), info.name, ": the rule describes ", factors.inputs.size(),
                        " tensors of ", call.tensors.size());
  if (info.returns.empty()) take_written_as_result(call, factors, bounds);
  bounds.outputs.resize(factors.outputs.size());
  const auto chosen = choose_placements(call, factors, bounds);
  enter_inputs(call, bounds, chosen, plan);
  check_split_sequences(info, call, bounds, chosen, plan);
  enter_outputs(call, factors, chosen, plan);
}

bool has_unknown_size(const rules::OutputPlan& output) { return absl::c_linear_search(output.sizes, rules::kUnknownSize); }

void check_written(const OpInfo& info, const Collected& all, const Plan& plan, const OpCall& call) {
  for (size_t r = 0; r < info.returns.size() && r < plan.outputs.size(); ++r) {
    for (const auto& tensor : all.tensors) {
      if (info.returns[r].written_argument != static_cast<int>(tensor.argument) || tensor.index >= 0) continue;
      const auto& sizes = plan.outputs[r].sizes;
      if (has_unknown_size(plan.outputs[r])) continue;
      TORCH_CHECK(tensor.sizes == sizes, info.name, ": the written tensor has shape ", c10::IntArrayRef(tensor.sizes),
                  ", but the result has shape ", c10::IntArrayRef(sizes), "; ", describe(call));
    }
  }
}

void check_whole_out(const OpInfo& info, const Collected& all, const OpCall& call) {
  for (const auto& tensor : all.tensors) {
    TORCH_CHECK(!info.arguments[tensor.argument].out || tensor.spec->is_replicated(), info.name,
                ": this operator runs on whole tensors, and its out= argument is ", to_string(tensor.spec->placements()),
                ". Redistribute that to Replicate() first; ", describe(call));
  }
}

/// What the DTensors among the arguments are called: " (the gradient of weight)"; their specs where none has a name.
std::string names_of(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments) {
  std::string names, specs;
  visit_tensors(info, arguments, [&](const at::Tensor& tensor, size_t) {
    const auto* meta = dtensor_meta(tensor);
    if (!meta) return;
    if (meta->provenance.name) names += (names.empty() ? "" : ", ") + description_of(*meta);
    specs += (specs.empty() ? "" : ", ") + meta->spec->to_string();
  });
  return " (" + (names.empty() ? specs : names) + ")";
}

/// Plain tensors beside DTensors: scalars, and what the rule or a scope allows; never one that is written.
void check_plain(const Collected& all, const OpInfo& info, const c10::FunctionSchema& schema, bool plain_allowed,
                 c10::ArrayRef<c10::IValue> arguments) {
  for (const auto& tensor : all.tensors) {
    if (!tensor.plain) continue;
    const auto& argument = schema.arguments()[tensor.argument].name();
    TORCH_CHECK(
        !info.arguments[tensor.argument].written, info.name, ": the written argument '", argument,
        "' is a plain tensor of shape ", c10::IntArrayRef(tensor.sizes), ", but others are DTensors", names_of(info, arguments),
        ". Use full_tensor() or to_local() on those; a parameter that no fully_shard claimed stays plain: shard the root module "
        "too (state_dict and tessera::clip_grad_norm_ of a module name such parameters), or clip them by themselves; state that "
        "an optimizer made before its parameters "
        "were sharded is converted by tessera::shard_optimizer");
    TORCH_CHECK(tensor.sizes.empty() || plain_allowed, info.name, ": a plain tensor of shape ", c10::IntArrayRef(tensor.sizes),
                " (argument '", argument, "') cannot be mixed with DTensors", names_of(info, arguments),
                ". Make it one with distribute_tensor or from_local, or use ImplicitReplication; in the forward of a "
                "torch::autograd::Function, take the whole of a sharded parameter with tessera::unsharded");
  }
}

/// What a plan says before its rule is asked.
Plan start_plan(const OpInfo& info, const Collected& all, const rules::OnLocals& rule) {
  Plan plan;
  plan.inputs.resize(all.tensors.size());
  plan.input_specs.resize(all.tensors.size());
  plan.moves_viewed = rule.kind == rules::KernelKind::kCopiesView;
  plan.on_mesh = all.mesh.coordinate().has_value();
  for (size_t i = 0; i < all.tensors.size(); ++i) {
    if (all.tensors[i].plain) plan.inputs[i].source = all.tensors[i].spec;
    if (info.arguments[all.tensors[i].argument].out) plan.input_specs[i] = all.tensors[i].spec;
  }
  return plan;
}

/// Takes strides and dtypes from what the operator itself says, and the sizes that the rule left open.
void check_geometry(const OpInfo& info, const std::vector<rules::Geometry>& geometry, Plan& plan, const OpCall& call) {
  TORCH_INTERNAL_ASSERT(geometry.size() == plan.outputs.size(), info.name, ": the rule describes ", plan.outputs.size(),
                        " outputs of ", geometry.size());
  for (size_t r = 0; r < plan.outputs.size(); ++r) {
    auto& output = plan.outputs[r];
    for (size_t d = 0; d < output.sizes.size() && d < geometry[r].sizes.size(); ++d) {
      if (output.sizes[d] == rules::kUnknownSize) output.sizes[d] = geometry[r].sizes[d];
    }
    TORCH_INTERNAL_ASSERT(output.sizes == geometry[r].sizes, info.name, ": the rule gives output ", r, " the shape ",
                          c10::IntArrayRef(output.sizes), ", the operator ", c10::IntArrayRef(geometry[r].sizes), "; ",
                          describe(call));
    output.strides = geometry[r].strides;
    output.dtype = geometry[r].dtype;
  }
}

/// The sizes that the rule left open, on a rank outside the mesh: it gets no results that tell them.
void complete_sizes(const c10::OperatorHandle& op, const OpInfo& info, c10::ArrayRef<c10::IValue> arguments, Plan& plan) {
  if (absl::c_none_of(plan.outputs, has_unknown_size)) return;
  const auto results = infer_outputs(op, info, arguments, StandIn::kZeros);
  for (size_t r = 0; results && r < std::min(results->size(), plan.outputs.size()); ++r) {
    auto& output = plan.outputs[r];
    const auto& known = (*results)[r].sizes; // none of an undefined result
    for (size_t d = 0; d < output.sizes.size(); ++d) {
      if (output.sizes[d] == rules::kUnknownSize) output.sizes[d] = d < known.size() ? known[d] : 0;
    }
    output.dtype = (*results)[r].dtype;
  }
}

} // namespace

Plan make_plan(const c10::OperatorHandle& op, const OpInfo& info, c10::ArrayRef<c10::IValue> arguments, const CallSite& site) {
  const auto all = collect(info, arguments);
  OpCall call{info.name, op.schema(), arguments, {}, all.mesh};
  const auto& rule = std::get<rules::OnLocals>(*info.rule);
  for (const auto& argument : info.arguments)
    TORCH_CHECK_NOT_IMPLEMENTED(!argument.out || argument.kind != ArgKind::kTensorList, info.name,
                                ": a list of DTensors cannot be its out=; use the operator that returns its results");
  const bool plain_allowed = rule.traits.contains(Trait::kPlainIsReplicate) || info.writes_places || replicates_plain_tensors() ||
                             is_planned(all.mesh) || site.own_temporaries();
  check_plain(all, info, op.schema(), plain_allowed, arguments);
  auto plan = start_plan(info, all, rule);
  std::optional<std::vector<rules::Geometry>> geometry;
  std::exception_ptr refused; // a rule that finds the same mistake says more about it
  try {
    if (!rule.traits.contains(Trait::kOwnEmptyShapes) || !has_empty(all)) geometry = infer_outputs(op, info, arguments);
  } catch (const c10::Error&) {
    refused = std::current_exception();
  }
  if (rule.traits.contains(Trait::kListElements)) {
    const auto length = list_length(all, info);
    for (int64_t position = 0; position < length; ++position) plan_part(info, all, call, position, site, plan);
    order_by_list(plan.outputs, static_cast<size_t>(length));
  } else {
    call.outputs = geometry ? &*geometry : nullptr;
    plan_part(info, all, call, -1, site, plan);
    check_written(info, all, plan, call);
    if (plan.wrapping.shapes == rules::Wrapping::kOfLocals) check_whole_out(info, all, call);
  }
  if (refused) std::rethrow_exception(refused);
  if (!geometry && !plan.on_mesh) complete_sizes(op, info, arguments, plan);
  if (geometry) check_geometry(info, *geometry, plan, call);
  for (auto& output : plan.outputs) output.local_sizes = local_box(output.sizes, all.mesh, output.placements).sizes;
  const bool writes_positions = written_positions(info, arguments) > 1;
  for (const auto& input : plan.inputs) {
    plan.moves_viewed |= info.views && input.moves;
    plan.joins_norms |= input.joins_norm;
    plan.by_position |= writes_positions && (input.moves || input.stretch);
  }
  return plan;
}

} // namespace tessera::internal::dispatch
