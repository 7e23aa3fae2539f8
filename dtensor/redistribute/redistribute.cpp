#include <tessera/dtensor/redistribute/redistribute.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/tensor.h>

#include <absl/algorithm/container.h>
#include <absl/container/flat_hash_map.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <mutex>

#include <tessera/base/per_thread.h>
#include <tessera/dtensor/debug.h>
#include <tessera/dtensor/tensor/program_scopes.h>
#include <tessera/dtensor/transitions/transition.h>

namespace tessera::internal {

namespace {

using redistribute::Move;
using redistribute::Transition;

at::Tensor apply_by_rows(const at::Tensor& local, const Transition& t, Move move);

at::Tensor apply(const at::Tensor& local, const Transition& t, Move move) {
  if (move == Move::kNone) return local;
  if (move != Move::kSlice && (is_strided(t.from) || is_strided(t.to))) return apply_by_rows(local, t, move);
  switch (move) {
    case Move::kSlice: return redistribute::slice(local, t);
    case Move::kToPartial: return redistribute::to_partial(local, t);
    case Move::kAllReduce: return redistribute::all_reduce(local, t);
    case Move::kReduceScatter: return redistribute::reduce_scatter(local, t);
    case Move::kAllGather: return redistribute::all_gather(local, t);
    case Move::kAllToAll: return redistribute::all_to_all(local, t);
    case Move::kMoveRanges: return redistribute::move_ranges(local, t);
    case Move::kNone:
    case Move::kImpossible: break;
  }
  TORCH_CHECK(false, t.label, ": only a replicated tensor can be turned into a ", to_string(t.to), ", not a ", to_string(t.from),
              " one");
}

at::Tensor apply(const at::Tensor& local, const Transition& t, const redistribute::Route& route) {
  if (!route.middle) return apply(local, t, route.first);
  auto first = t, second = t;
  first.to = second.from = *route.middle;
  first.deferred = nullptr;
  return apply(apply(local, first, route.first), second, route.second);
}

/// A StridedShard is a RaggedShard of the tensor whose split dim comes first, the rows of each rank together.
at::Tensor apply_by_rows(const at::Tensor& local, const Transition& t, Move move) {
  const bool from_strided = is_strided(t.from);
  const auto& strided = std::get<StridedShard>(from_strided ? t.from : t.to);
  const auto size = t.sizes[strided.dim];
  RaggedShard rows{0, {}};
  std::vector<int64_t> order;
  for (int64_t r = 0; r < t.ranks(); ++r) {
    const auto before = order.size();
    for (const auto& part : strided_extents(size, strided.split_factor, t.ranks(), r)) {
      for (int64_t i = 0; i < part.size; ++i) order.push_back(part.offset + i);
    }
    rows.extents.push_back(static_cast<int64_t>(order.size() - before));
  }
  const auto position = at::tensor(order, at::TensorOptions().dtype(at::kLong).device(local.device()));
  auto t_rows = t;
  std::rotate(t_rows.sizes.begin(), t_rows.sizes.begin() + strided.dim, t_rows.sizes.begin() + strided.dim + 1);
  (from_strided ? t_rows.from : t_rows.to) = rows;
  const auto first = local.movedim(strided.dim, 0);
  return after(apply(from_strided ? first.contiguous() : first.index_select(0, position), t_rows, move), t,
               [from_strided, position, dim = strided.dim](const at::Tensor& moved) {
                 return (from_strided ? moved.index_select(0, position.argsort()) : moved).movedim(0, dim).contiguous();
               });
}

Transition make_transition(const Spec& spec, const DeviceMesh& line, const Placements& current, const RedistributeStep& step,
                           const std::string& label) {
  const auto& mesh = spec.mesh();
  auto view = view_without(spec.sizes(), mesh.shape(), *mesh.coordinate(), current, step.mesh_dims);
  const auto shift = [&view](Placement placement) {
    if (auto* ragged = std::get_if<RaggedShard>(&placement)) *ragged = cut_at(*ragged, view.sizes);
    if (auto* shard = std::get_if<Shard>(&placement)) shard->dim -= view.flattened;
    if (auto* strided = std::get_if<StridedShard>(&placement)) strided->dim -= view.flattened;
    return placement;
  };
  const auto mesh_dim = step.mesh_dims.size() > 1 ? 0 : step.mesh_dims[0];
  auto from = shift(current[step.mesh_dims[0]]), to = shift(step.to);
  return Transition{line, mesh_dim, std::move(view.sizes), std::move(from), std::move(to), label};
}

struct Plan {
  std::vector<RedistributeStep> steps;
  std::string text; ///< what moves: part of each collective's label, so that ranks notice that they move different things
};

/// Plans by the ids of two specs.
constinit PerThread<absl::flat_hash_map<std::pair<uint64_t, uint64_t>, Plan>> moves;

/// The plan from one spec to another, kept by thread: the search costs more than most moves of small tensors.
const Plan& planned(const Spec& from, const Spec& to) {
  constexpr size_t kMost = 4096;
  auto& plans = *moves;
  if (plans.size() >= kMost) plans.clear();
  const auto [entry, added] = plans.try_emplace(std::pair(from.id(), to.id()));
  if (added) {
    auto steps = plan_redistribute(from.placements(), to.placements(), from.mesh().shape(), from.sizes(),
                                   static_cast<double>(c10::elementSize(from.dtype())));
    auto text =
        fmt::format(": [{}] {} -> {}", fmt::join(from.sizes(), ", "), to_string(from.placements()), to_string(to.placements()));
    entry->second = {std::move(steps), std::move(text)};
  }
  return entry->second;
}

/// What stands for the type of `local` where a signed one gives the same bits.
at::ScalarType moved_as(const at::Tensor& local, const Spec& from, const Spec& to) {
  for (const auto& placements : {from.placements(), to.placements()}) {
    for (const auto& placement : placements) {
      const auto* partial = std::get_if<Partial>(&placement);
      const bool wraps = !partial || reduce_together(*partial, Partial{}) || partial->op == Partial::Op::kProduct;
      if (!wraps) return local.scalar_type();
    }
  }
  return signed_type(local.scalar_type());
}

at::Tensor run_plan(const at::Tensor& local, const Spec& from, const Spec& to, std::string_view label,
                    const MoveRequest& request) {
  auto* const deferred = request.deferred;
  auto result = local.is_conj() || local.is_neg() ? local.resolve_conj().resolve_neg() : local; // collectives move plain bytes
  const auto dtype = local.scalar_type(), moved = moved_as(local, from, to);
  if (moved != dtype) result = result.view(moved);
  auto current = from.placements();
  const auto plan = planned(from, to); // a copy: collectives may run other code of this thread
  const auto text = std::string(label) + plan.text;
  for (const auto& step : plan.steps) {
    const auto line = step.mesh_dims.size() > 1 ? from.mesh().flatten() : from.mesh();
    auto transition = make_transition(from, line, current, step, text);
    if (&step == &plan.steps.back()) transition.deferred = deferred;
    transition.signs_checked = request.signs_checked || absl::c_any_of(current, is_norm); // a part of a norm is one anyway
    transition.parts_differ = !absl::c_all_of(current, is_replicate);
    result = apply(result, transition, step.route);
    for (const auto m : step.mesh_dims) current[m] = step.to;
  }
  if (moved == dtype) return result;
  if (!deferred || !deferred->started) return result.view(dtype);
  deferred->then.emplace_back([dtype](const at::Tensor& bits) { return bits.view(dtype); });
  return result;
}

/// An offloaded part lies on the host, and travels where its mesh is. The result lies on the host again.
at::Tensor run_where_mesh_is(const at::Tensor& local, const Spec& from, const Spec& to, std::string_view label,
                             const MoveRequest& request) {
  const auto device = from.mesh().device();
  if (C10_LIKELY(!local.is_cpu() || device.is_cpu())) return run_plan(local, from, to, label, request);
  return run_plan(local.to(device), from, to, label, {nullptr, request.signs_checked}).to(at::kCPU);
}

/// Guards the values that are kept for one-element Partial tensors.
std::mutex& reduced_value_mutex() {
  static std::mutex mutex;
  return mutex;
}

} // namespace

at::ScalarType signed_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kUInt16: return at::kShort;
    case at::kUInt32: return at::kInt;
    case at::kUInt64: return at::kLong;
    default: return dtype;
  }
}

bool same_local(const Spec& from, const Spec& to) {
  for (size_t m = 0; m < from.placements().size(); ++m) {
    const auto &before = from.placements()[m], &after = to.placements()[m];
    if (before == after || same_value(before, after)) continue;
    if (from.mesh().shape()[m] != 1 || is_norm(before) || is_norm(after)) return false;
  }
  return from.local_sizes() == to.local_sizes();
}

at::Tensor redistribute_local(const at::Tensor& local, const Spec& from, const Spec& to, std::string_view label,
                              const MoveRequest& request) {
  TORCH_CHECK(from.mesh() == to.mesh(), label, ": a tensor cannot move between meshes: ", from.to_string(), " to ",
              to.to_string());
  if (!from.on_mesh() || same_local(from, to)) return local;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  // It takes no operator of two dtypes, and refuses to join parts in half precision of another kind than its own.
  const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
  auto* const log = program_scopes().log;
  if (C10_LIKELY(!log)) return run_where_mesh_is(local, from, to, label, request);
  const CountCollectives collectives;
  auto result = run_where_mesh_is(local, from, to, label, request);
  add_record(*log, {std::string(label), from.sizes(), from.placements(), to.placements(), collectives.total_bytes()});
  return result;
}

at::Tensor redistribute_local(const at::Tensor& dtensor, DTensorMeta& meta, const SpecPtr& to, std::string_view label,
                              const MoveRequest& request) {
  const bool may_keep = meta.spec->numel() == 1 && meta.spec->has_partial() && to->is_replicated() && !dtensor.is_inference() &&
                        !meta.local.is_inference();
  if (C10_LIKELY(!may_keep)) return redistribute_local(meta.local, *meta.spec, *to, label, request);
  const auto version = static_cast<uint32_t>(dtensor._version()), local_version = static_cast<uint32_t>(meta.local._version());
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  {
    std::lock_guard lock(reduced_value_mutex());
    const auto& kept = meta.reduced;
    if (kept && kept->spec == to && kept->version == version && kept->local_version == local_version) return kept->local.clone();
  }
  auto result = redistribute_local(meta.local, *meta.spec, *to, label);
  if (result.is_alias_of(meta.local)) return result;
  auto value = std::make_shared<const ReducedValue>(ReducedValue{result.clone(), to, version, local_version});
  std::lock_guard lock(reduced_value_mutex());
  if (meta.keeps_reduced) meta.reduced = std::move(value);
  return result;
}

void forget_reduced_value(DTensorMeta& meta, bool for_good) {
  std::lock_guard lock(reduced_value_mutex());
  meta.reduced.reset();
  if (for_good) meta.keeps_reduced = false;
}

} // namespace tessera::internal
