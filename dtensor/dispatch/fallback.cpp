#include <tessera/dtensor/dispatch/fallback.h>

#include <torch/library.h>

#include <absl/algorithm/container.h>
#include <absl/container/flat_hash_set.h>
#include <absl/strings/str_split.h>

#include <algorithm>
#include <mutex>

#include <tessera/activations/kept_results.h>
#include <tessera/base/per_thread.h>
#include <tessera/dtensor/calls/call_site.h>
#include <tessera/dtensor/calls/list_positions.h>
#include <tessera/dtensor/calls/planned_meshes.h>
#include <tessera/dtensor/calls/visit_tensors.h>
#include <tessera/dtensor/dispatch/meet_groups.h>
#include <tessera/dtensor/dispatch/meet_plain.h>
#include <tessera/dtensor/dispatch/split_loss.h>
#include <tessera/dtensor/execute/execute.h>
#include <tessera/dtensor/plan/plan_cache.h>
#include <tessera/dtensor/redistribute/redistribute.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/dtensor/tensor/program_scopes.h>

namespace tessera::internal::dispatch {

namespace {

using torch::jit::Stack;

constinit PerThread<PlanCache> plans;

[[noreturn]] void no_rule(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments) {
  std::string text;
  const DeviceMesh* mesh = nullptr;
  visit_tensors(info, arguments, [&](const at::Tensor& tensor, size_t) {
    const auto* meta = dtensor_meta(tensor);
    if (!meta) return;
    mesh = &meta->spec->mesh();
    auto full = meta->spec->to_string();
    text += (text.empty() ? "" : ", ") + full.substr(0, full.rfind(" on "));
  });
  TORCH_CHECK(false, info.name, ": no sharding rule for this operator; arguments ", text, " on ",
              mesh ? mesh->to_string() : "no mesh", ". Redistribute to Replicate() and use to_local(), or full_tensor()");
}

/// A derivative formula or a decomposition makes plain zeros, the same on every rank, and writes DTensors into them: they become
/// replicated DTensors.
void adopt_temporaries(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments) {
  const DTensorMeta* other = nullptr;
  any_tensor(info, arguments, [&](const at::Tensor& tensor, size_t) { return (other = dtensor_meta(tensor)) != nullptr; });
  for (size_t i = 0; other && i < info.arguments.size(); ++i) {
    const auto& value = arguments[i];
    if (!info.arguments[i].written || !value.isTensor() || !value.toTensor().defined()) continue;
    const auto& tensor = value.toTensor();
    if (dtensor_meta(tensor) || tensor.is_inference() || tensor.storage().use_count() != 1) continue;
    const auto& mesh = other->spec->mesh();
    auto layout = Spec::intern(mesh, Placements(mesh.ndim()), tensor.sizes().vec(), tensor.scalar_type(), tensor.strides().vec());
    become_dtensor(tensor, c10::make_intrusive<DTensorMeta>(tensor.detach(), std::move(layout)));
  }
}

/// A derivative formula may write through a view that it takes of a temporary. Where the temporary has to move for the view, it
/// moves in place, so that the view is none of a copy. Whether it did: then the call needs another plan.
bool move_viewed_temporary(const OpInfo& info, const Plan& plan, const c10::IValue& viewed) {
  constexpr size_t kFormulaAndStack = 2; // hold a temporary; autograd or the user as well what is none
  if (!viewed.isTensor() || viewed.toTensor().use_count() > kFormulaAndStack || !plan.inputs[0].moves) return false;
  auto* meta = dtensor_meta(viewed.toTensor());
  if (!meta || shares_memory(*meta)) return false;
  auto moved = redistribute_local(viewed.toTensor(), *meta, plan.inputs[0].target, info.name);
  meta->local = moved.is_alias_of(meta->local) ? moved.clone() : std::move(moved);
  meta->spec = plan.inputs[0].target;
  return true;
}

bool has_plain_tensors(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments) {
  return any_tensor(info, arguments, [](const at::Tensor& tensor, size_t) { return tensor.dim() > 0 && !dtensor_meta(tensor); });
}

/// The mesh of the DTensors among the arguments, if tensor parallelism has planned how activations lie on it; else null.
const DeviceMesh* planned_mesh(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments) {
  if (C10_LIKELY(PlannedMeshes::instance().count() == 0)) return nullptr;
  const DeviceMesh* mesh = nullptr;
  any_tensor(info, arguments, [&](const at::Tensor& tensor, size_t) {
    const auto* meta = dtensor_meta(tensor);
    if (meta) mesh = &meta->spec->mesh();
    return meta != nullptr;
  });
  return mesh && is_planned(*mesh) ? mesh : nullptr;
}

/// Runs the operator as others. A kernel that ends in the operator itself is no decomposition.
void decompose(const c10::OperatorHandle& op, const OpInfo& info, c10::DispatchKey key, Stack* stack) {
  constexpr int kDeepest = 64;
  const auto arguments = arguments_of(info, *stack);
  const bool all_dtensors =
      program_scopes().implicit_replication || !has_plain_tensors(info, arguments) || planned_mesh(info, arguments);
  const DecompositionScope scope(all_dtensors, info.writes);
  if (decompositions().depth > kDeepest) no_rule(info, arguments);
  op.callBoxedForDispatchKey(key, *stack);
}

/// Whether what is to join a norm has negative values. It is replicated: all ranks come to the same answer.
bool has_negative(const OpInfo& info, const Plan& plan, c10::ArrayRef<c10::IValue> arguments) {
  size_t input = 0;
  const auto is_negative = [&](const c10::IValue& value) {
    if (!plan.inputs[input++].joins_norm) return false;
    const auto* meta = dtensor_meta(value.toTensor());
    return (meta ? meta->local : value.toTensor()).lt(0).any().item<bool>();
  };
  for (const size_t i : info.tensors) {
    const auto& value = arguments[i];
    if (info.arguments[i].kind == ArgKind::kTensor ? is_negative(value)
                                                   : value.isList() && absl::c_any_of(value.toListRef(), is_negative))
      return true;
  }
  return false;
}

/// The plan of a call, kept under `key`, or made anew where that is null.
std::shared_ptr<Plan> planned(const c10::OperatorHandle& op, const OpInfo& info, c10::ArrayRef<c10::IValue> arguments,
                              const CallSite& site, const CallKey* key) {
  auto& known = *plans;
  if (auto plan = known.find(key)) return plan;
  auto plan = std::make_shared<Plan>(make_plan(op, info, arguments, site));
  if (key) known.insert(*key, plan);
  return plan;
}

/// Whether this is the first rank of the mesh, which speaks for all.
bool is_first_rank(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments) {
  return any_tensor(info, arguments, [](const at::Tensor& tensor, size_t) {
    const auto* meta = dtensor_meta(tensor);
    const auto* coordinate = meta && meta->spec->on_mesh() ? &*meta->spec->mesh().coordinate() : nullptr;
    return coordinate && absl::c_all_of(*coordinate, [](int64_t index) { return index == 0; });
  });
}

/// An operator that is run on whole tensors, where that moves data: an error under StrictSharding, else a warning, once and from
/// one rank.
void note_replication(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments, const Plan& plan) {
  const bool moves =
      std::any_of(plan.inputs.begin(), plan.inputs.end(), [](const auto& input) { return input.target != nullptr; });
  if (!moves) return;
  if (program_scopes().strict_sharding) no_rule(info, arguments);
  if (!is_first_rank(info, arguments)) return;
  static std::mutex mutex;
  static auto* warned = new absl::flat_hash_set<std::string>;
  const std::lock_guard lock(mutex);
  if (warned->insert(info.name).second) {
    TORCH_WARN(info.name,
               ": no sharding rule for this operator; its arguments are redistributed to Replicate(). Under "
               "tessera::StrictSharding this is an error. (This warning comes once, from one rank.)");
  }
}

/// Under StrictSharding it is an error in forward that an activation moves which a plan has split: the plan moves none but those
/// that enter and leave its layers. A number may, for a norm or a loss, and what the program has summed over a split dim.
void check_follows_plan(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments, const Plan& plan) {
  if (C10_LIKELY(PlannedMeshes::instance().count() == 0)) return;
  if (!program_scopes().strict_sharding || !planned_mesh(info, arguments) || !is_forward(call_origin())) return;
  size_t position = 0;
  const auto check = [&](const c10::IValue& value) {
    const auto& input = plan.inputs[position++];
    const auto* meta = value.isTensor() ? dtensor_meta(value.toTensor()) : nullptr;
    if (!meta || !input.moves || meta->spec->numel() <= 1 || absl::c_none_of(meta->spec->placements(), is_sharded)) return;
    TORCH_CHECK(false, info.name, ": an argument, ", description_of(*meta), ", lies as ", to_string(meta->spec->placements()),
                ", which this operator cannot take: it would have to become ", to_string(input.target->placements()),
                ", and the plan of `parallelize` does not say so. Under tessera::StrictSharding this is an error");
  };
  for (const size_t i : info.tensors) {
    if (info.arguments[i].kind == ArgKind::kTensor) {
      check(arguments[i]);
    } else if (arguments[i].isList()) {
      for (const auto& element : arguments[i].toListRef()) check(element);
    }
  }
}

/// Operators that autograd takes apart before the DTensor key sees them, and that make plain tensors of their own or write into
/// what they compute.
constexpr const char* kComposites =
    "_scaled_dot_product_attention_math combinations cosine_similarity istft "
    "linalg_matrix_rank.atol_rtol_float linalg_matrix_rank.atol_rtol_tensor nanquantile nanquantile.scalar one_hot quantile "
    "quantile.scalar rms_norm";

void run_composite(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  constexpr auto kKernel = c10::DispatchKey::CompositeImplicitAutograd;
  if (!keys.has(kDTensorKey)) {
    const auto below = keys & c10::after_autograd_keyset;
    const bool is_no_composite = op.hasKernelForDispatchKey(below.highestPriorityTypeId()); // of a registered device
    return is_no_composite ? op.redispatchBoxed(below, stack) : op.callBoxedForDispatchKey(kKernel, *stack);
  }
  const auto& info = op_info(op);
  if (KeptResults::Scope::active() && !has_dtensors(info, arguments_of(info, *stack)))
    return op.callBoxedForDispatchKey(kKernel, *stack);
  if (run_on_whole(op, info, stack)) return;
  decompose(op, info, kKernel, stack);
}

/// Where no gradient is asked for, PyTorch's kernel reads the memory of the host: the operator that returns the indices as well
/// is made of others.
void run_max_pool1d(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  if (!keys.has(kDTensorKey)) return run_composite(op, keys, stack);
  static const auto with_indices = c10::Dispatcher::singleton().findSchemaOrThrow("aten::max_pool1d_with_indices", "");
  with_indices.callBoxed(*stack);
  stack->pop_back();
}

void run_cross_entropy(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  if (!keys.has(kDTensorKey) || !serves_split_cross_entropy(arguments)) return run_composite(op, keys, stack);
  auto loss = split_cross_entropy(arguments);
  torch::jit::drop(*stack, arguments.size());
  torch::jit::push(*stack, std::move(loss));
}

void register_max_pool1d(torch::Library& library) {
  library.impl("max_pool1d", torch::CppFunction::makeFromBoxedFunction<&run_max_pool1d>());
}

void register_composites(torch::Library& library) {
  for (const auto name : absl::StrSplit(kComposites, ' ')) {
    library.impl(std::string(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_composite>());
  }
  register_max_pool1d(library);
  library.impl("cross_entropy_loss", torch::CppFunction::makeFromBoxedFunction<&run_cross_entropy>());
}

} // namespace

bool has_dtensors(const CallSchema& schema, c10::ArrayRef<c10::IValue> arguments) {
  return any_tensor(schema, arguments, [](const at::Tensor& tensor, size_t) { return dtensor_meta(tensor) != nullptr; });
}

void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const auto& info = op_info(op);
  const auto arguments = arguments_of(info, *stack);
  // Included while results are kept: on the thread that keeps them, and on those of autograd for a backward that it calls.
  if (C10_UNLIKELY(c10::impl::tls_is_dispatch_key_included(kDTensorKey) && !has_dtensors(info, arguments))) {
    const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kDTensorKey);
    auto* const keeps = KeptResults::Scope::active();
    return keeps ? keeps->run(op, below, stack) : op.redispatchBoxed(below, stack);
  }
  if (C10_UNLIKELY(run_on_whole(op, info, stack))) return;
  if (C10_UNLIKELY(!std::get_if<rules::OnLocals>(info.rule))) {
    if (const auto* handler = std::get_if<rules::Handler>(info.rule)) return (*handler)(op, stack);
    if (info.decomposition && info.rule) return op.callBoxedForDispatchKey(*info.decomposition, *stack);
    if (info.decomposition) return decompose(op, info, *info.decomposition, stack);
    no_rule(info, arguments);
  }
  if (C10_UNLIKELY(PlannedMeshes::instance().has_groups()) && bring_to_one_mesh(info, stack)) return run(op, keys, stack);
  CallSite site(info, arguments);
  CallKey key;
  constexpr uint64_t kPlanned = 7; // no address of an OpInfo ends so, and no other first word
  if (const auto meshes = PlannedMeshes::instance().count(); C10_UNLIKELY(meshes > 0)) key.push_back(meshes << 3 | kPlanned);
  if (C10_UNLIKELY(site.own_temporaries())) key.push_back(site.shares_written() ? 2 : 1);
  if (C10_UNLIKELY(site.own_temporaries() && info.writes)) adopt_temporaries(info, arguments);
  const auto state = make_key(info, arguments, key);
  const auto* const kept_under = state == KeyState::kComplete ? &key : nullptr;
  if (C10_UNLIKELY(state == KeyState::kPlainTensor)) site.ask_own_temporaries();
  auto plan = planned(op, info, arguments, site, kept_under);
  if (C10_UNLIKELY(plan->joins_norms) && has_negative(info, *plan, arguments)) {
    constexpr uint64_t kKeepsSigns = 1; // a word more than other keys of the call have
    site.keep_signs();
    key.push_back(kKeepsSigns);
    plan = planned(op, info, arguments, site, kept_under);
  }
  if (C10_UNLIKELY(plan->by_position)) return run_by_position(op, info, stack, [&](Stack* position) { run(op, keys, position); });
  if (C10_UNLIKELY(info.replicates)) note_replication(info, arguments, *plan);
  check_follows_plan(info, arguments, *plan);
  const bool may_move_viewed = plan->moves_viewed && site.ask_own_temporaries();
  if (C10_UNLIKELY(may_move_viewed) && move_viewed_temporary(info, *plan, arguments[0])) return run(op, keys, stack);
  execute(op, info, *plan, stack);
}

CacheStatistics cache_statistics() { return plans->statistics(); }
void clear_cache() { plans->clear(); }

} // namespace tessera::internal::dispatch

TORCH_LIBRARY_IMPL(aten, AutogradCPU, library) { tessera::internal::dispatch::register_composites(library); }
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, library) { tessera::internal::dispatch::register_composites(library); }
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) { tessera::internal::dispatch::register_composites(library); }
// A plain tensor of the meta device beside a DTensor of it, which has the CPU's keys.
TORCH_LIBRARY_IMPL(aten, AutogradMeta, library) { tessera::internal::dispatch::register_composites(library); }

TORCH_LIBRARY_IMPL(aten, Fake, library) { tessera::internal::dispatch::register_max_pool1d(library); }

TORCH_LIBRARY_IMPL(_, Fake, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&tessera::internal::dispatch::run>());
}
