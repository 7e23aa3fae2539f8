#include <ATen/ops/empty_strided.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <exception>

#include <tessera/dtensor/dispatch/plan.h>
#include <tessera/dtensor/dtensor_impl.h>
#include <tessera/dtensor/redistribute/redistribute.h>
#include <tessera/dtensor/sharding_math.h>

namespace tessera::dispatch {

namespace {

using rules::OpCall;
using rules::TensorArg;

/// All tensor arguments, out= ones included, lists spread.
struct Collected {
  std::vector<TensorArg> tensors;
  std::vector<bool> plain;
  DeviceMesh mesh;
};

void add_tensor(const OpInfo& info, const c10::IValue& value, size_t argument, int64_t index, Collected& all) {
  TensorArg entry{argument, index, false, {}, at::kFloat, nullptr};
  const bool defined = value.isTensor() && value.toTensor().defined();
  bool plain = false;
  if (defined) {
    const auto& tensor = value.toTensor();
    entry.defined = true;
    entry.sizes = tensor.sizes().vec();
    entry.dtype = tensor.scalar_type();
    if (const auto* meta = dtensor_meta(tensor)) {
      entry.spec = meta->spec;
      TORCH_CHECK(!all.mesh.defined() || all.mesh == meta->spec->mesh(), info.name,
                  ": the arguments lie on different meshes: ", all.mesh.to_string(), " and ", meta->spec->mesh().to_string(),
                  ". Move one with redistribute(mesh, placements), where both have the same ranks");
      all.mesh = meta->spec->mesh();
    } else {
      plain = true;
    }
  }
  all.tensors.push_back(std::move(entry));
  all.plain.push_back(plain);
}

Collected collect(const OpInfo& info, const torch::jit::Stack& stack, size_t begin) {
  Collected all;
  for (size_t i = 0; i < info.arguments.size(); ++i) {
    const auto& value = stack[begin + i];
    if (info.arguments[i].kind == ArgKind::kTensor) {
      add_tensor(info, value, i, -1, all);
    } else if (info.arguments[i].kind == ArgKind::kTensorList && !value.isNone()) {
      const auto list = value.toListRef();
      for (size_t k = 0; k < list.size(); ++k) add_tensor(info, list[k], i, static_cast<int64_t>(k), all);
    }
  }
  TORCH_INTERNAL_ASSERT(all.mesh.defined(), info.name, " reached the DTensor fallback without a DTensor");
  const Placements replicated(all.mesh.ndim());
  for (size_t i = 0; i < all.tensors.size(); ++i) {
    auto& tensor = all.tensors[i];
    if (all.plain[i]) tensor.spec = Spec::intern(all.mesh, replicated, tensor.sizes, tensor.dtype);
  }
  return all;
}

std::vector<int64_t> list_positions(const Collected& all, const OpInfo& info) {
  int64_t count = -1;
  for (const auto& tensor : all.tensors) {
    if (!info.arguments[tensor.argument].out) count = std::max(count, tensor.index);
  }
  std::vector<int64_t> positions;
  for (int64_t k = 0; k <= count; ++k) positions.push_back(k);
  return positions;
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

/// Runs the rule on the tensors of one list position (all of them for `position` < 0) and enters the result in `plan`.
void plan_part(const OpInfo& info, const Collected& all, OpCall& call, int64_t position, Origin origin, Plan& plan) {
  std::vector<size_t> source;
  std::vector<bool> fixed;
  call.tensors.clear();
  std::vector<const Placements*> fixed_outputs(info.returns.size());
  std::vector<int> tied(info.returns.size(), -1);
  for (size_t i = 0; i < all.tensors.size(); ++i) {
    const auto& tensor = all.tensors[i];
    const auto& argument = info.arguments[tensor.argument];
    for (size_t r = 0; r < info.returns.size(); ++r) {
      const bool same = info.returns[r].written_argument == static_cast<int>(tensor.argument);
      if (same && tensor.spec) fixed_outputs[r] = &tensor.spec->placements();
    }
    if (argument.out || (position >= 0 && tensor.index >= 0 && tensor.index != position)) continue;
    call.tensors.push_back(tensor);
    source.push_back(i);
    const bool may_move = origin.own_temporaries && tensor.index < 0 && tensor.spec;
    for (size_t r = 0; argument.written && may_move && r < info.returns.size(); ++r) {
      fixed_outputs[r] = nullptr;
      if (info.returns[r].written_argument == static_cast<int>(tensor.argument)) tied[r] = static_cast<int>(source.size()) - 1;
    }
    fixed.push_back(argument.written && !may_move);
  }
  auto factors = info.rule->factorize(call);
  factors.asks_offsets = info.rule->local && !info.rule->ignores_offsets;
  TORCH_INTERNAL_ASSERT(factors.inputs.size() == call.tensors.size(), info.name, ": the rule describes ", factors.inputs.size(),
                        " tensors of ", call.tensors.size());
  if (info.returns.empty()) {
    // An operator that only writes: the first tensor that it writes is its result, and keeps its placement.
    const auto written = std::find(fixed.begin(), fixed.end(), true) - fixed.begin();
    if (written < std::ssize(fixed) && call.tensors[written].spec) {
      factors.outputs.assign(1, factors.inputs[written]);
      fixed_outputs.assign(1, &call.tensors[written].spec->placements());
    }
  }
  plan.outputs_unknown = factors.outputs_unknown;
  plan.plain_outputs = factors.plain_outputs;
  fixed_outputs.resize(factors.outputs.size());
  tied.resize(factors.outputs.size(), -1);
  const auto chosen = propagate(call, factors, fixed, fixed_outputs, tied);
  for (size_t i = 0; i < source.size(); ++i) {
    const auto& spec = call.tensors[i].spec;
    if (!spec) continue;
    const auto target = spec->placements() == chosen.inputs[i] ? spec : spec->with(chosen.inputs[i]);
    auto& input = plan.inputs[source[i]];
    TORCH_CHECK(!plan.ran[source[i]] || plan.ran[source[i]] == target, info.name,
                ": one tensor would need several placements at once; ", describe(call));
    plan.ran[source[i]] = target;
    if (target != spec) input.target = target;
    input.moves = target != spec && !same_local(*spec, *target);
  }
  for (size_t r = 0; r < factors.outputs.size(); ++r) {
    rules::OutputPlan output{chosen.outputs[r], factors.outputs[r].sizes, contiguous_strides(factors.outputs[r].sizes)};
    output.dtype = call.tensors.empty() ? at::kFloat : call.tensors[0].dtype;
    if (r == 0 && !factors.strides.empty()) output.strides = factors.strides;
    plan.outputs.push_back(std::move(output));
  }
}

void check_written(const OpInfo& info, const Collected& all, const Plan& plan, const OpCall& call) {
  for (size_t r = 0; r < info.returns.size() && r < plan.outputs.size(); ++r) {
    for (const auto& tensor : all.tensors) {
      if (info.returns[r].written_argument != static_cast<int>(tensor.argument) || tensor.index >= 0) continue;
      const auto& sizes = plan.outputs[r].sizes;
      if (std::find(sizes.begin(), sizes.end(), rules::kUnknownSize) != sizes.end()) continue;
      TORCH_CHECK(tensor.sizes == sizes, info.name, ": the written tensor has shape [",
                  fmt::format("{}", fmt::join(tensor.sizes, ", ")), "], but the result has shape [",
                  fmt::format("{}", fmt::join(plan.outputs[r].sizes, ", ")), "]; ", describe(call));
    }
  }
}

/// What the DTensors among the arguments are called: " (the gradient of weight)"; their specs where none has a name.
std::string names_of(const torch::jit::Stack& stack, size_t begin) {
  std::string names, specs;
  const auto add = [&](const c10::IValue& value) {
    const auto* meta = value.isTensor() ? dtensor_meta(value.toTensor()) : nullptr;
    if (!meta) return;
    if (meta->name)
      names += (names.empty() ? "" : ", ") + std::string(meta->computed ? "computed from " : "") + meta->name->to_string();
    specs += (specs.empty() ? "" : ", ") + meta->spec->to_string();
  };
  for (size_t i = begin; i < stack.size(); ++i) {
    add(stack[i]);
    if (stack[i].isTensorList()) {
      for (const c10::IValue& element : stack[i].toListRef()) add(element);
    }
  }
  return " (" + (names.empty() ? specs : names) + ")";
}

/// Plain tensors beside DTensors: scalars, and what the rule or a scope allows; never one that is written.
void check_plain(const Collected& all, const OpInfo& info, const c10::FunctionSchema& schema, bool plain_allowed,
                 const torch::jit::Stack& stack, size_t begin) {
  for (size_t i = 0; i < all.tensors.size(); ++i) {
    if (!all.plain[i]) continue;
    const auto& argument = schema.arguments()[all.tensors[i].argument].name();
    TORCH_CHECK(
        !info.arguments[all.tensors[i].argument].written, info.name, ": the written argument '", argument,
        "' is a plain tensor, but others are DTensors", names_of(stack, begin),
        ". Use full_tensor() or to_local() on those; a parameter that no fully_shard claimed stays plain: shard the root module "
        "too; state that an optimizer made before its parameters were sharded is converted by tessera::shard_optimizer");
    TORCH_CHECK(all.tensors[i].sizes.empty() || plain_allowed, info.name, ": a plain tensor of shape [",
                fmt::format("{}", fmt::join(all.tensors[i].sizes, ", ")), "] (argument '", argument,
                "') cannot be mixed with DTensors", names_of(stack, begin),
                ". Make it one with distribute_tensor or from_local, or use ImplicitReplication; in the forward of a "
                "torch::autograd::Function, take the whole of a sharded parameter with tessera::unsharded");
  }
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

} // namespace

Plan make_plan(const c10::OperatorHandle& op, const OpInfo& info, const torch::jit::Stack& stack, size_t begin, Origin origin) {
  const auto all = collect(info, stack, begin);
  OpCall call{info.name, op.schema(), c10::ArrayRef<c10::IValue>(stack).slice(begin), {}, all.mesh};
  const bool plain_allowed = info.rule->plain_is_replicate || implicit_replication_enabled() || origin.own_temporaries;
  check_plain(all, info, op.schema(), plain_allowed, stack, begin);
  Plan plan;
  plan.inputs.resize(all.tensors.size());
  plan.ran.resize(all.tensors.size());
  plan.moves_viewed = info.rule->copies;
  plan.on_mesh = all.mesh.coordinate().has_value();
  for (size_t i = 0; i < all.tensors.size(); ++i) {
    if (all.plain[i]) plan.inputs[i].source = all.tensors[i].spec;
    if (info.arguments[all.tensors[i].argument].out) plan.ran[i] = all.tensors[i].spec;
  }
  std::optional<std::vector<rules::Geometry>> geometry;
  std::exception_ptr refused; // a rule that finds the same mistake says more about it
  try {
    geometry = infer_outputs(op, info, stack, begin);
  } catch (const c10::Error&) {
    refused = std::current_exception();
  }
  if (info.rule->foreach) {
    const auto positions = list_positions(all, info);
    for (const auto position : positions) plan_part(info, all, call, position, origin, plan);
    order_by_list(plan.outputs, positions.size());
  } else {
    call.outputs = geometry ? &*geometry : nullptr;
    plan_part(info, all, call, -1, origin, plan);
    check_written(info, all, plan, call);
    for (const auto& tensor : all.tensors) {
      TORCH_CHECK(!plan.outputs_unknown || !info.arguments[tensor.argument].out || tensor.spec->is_replicated(), info.name,
                  ": this operator runs on whole tensors, and its out= argument is ", to_string(tensor.spec->placements()),
                  ". Redistribute that to Replicate() first; ", describe(call));
    }
  }
  if (refused) std::rethrow_exception(refused);
  if (geometry) check_geometry(info, *geometry, plan, call);
  for (auto& output : plan.outputs) output.local_sizes = local_box(output.sizes, all.mesh, output.placements).sizes;
  for (const auto& input : plan.inputs) plan.moves_viewed |= info.views && input.moves;
  return plan;
}

} // namespace tessera::dispatch
