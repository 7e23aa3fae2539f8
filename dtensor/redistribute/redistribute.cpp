#include <tessera/dtensor/redistribute/redistribute.h>

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <limits>
#include <mutex>

#include <tessera/dtensor/redistribute/transition.h>

namespace tessera {

namespace {

using redistribute::Transition;

at::Tensor apply(const at::Tensor& local, const Transition& t) {
  const auto through = [&](const Placement& middle) {
    auto first = t, second = t;
    first.to = second.from = middle;
    return apply(apply(local, first), second);
  };
  if (t.from == t.to) return local;
  if (is_partial(t.from)) {
    if (is_replicate(t.to)) return redistribute::all_reduce(local, t);
    return redistribute::reduce_scatter(local, t);
  }
  if (is_partial(t.to)) {
    TORCH_CHECK(std::get<Partial>(t.to).op != Partial::Op::kNorm || is_replicate(t.from), t.label,
                ": only a replicated tensor can be "
                "turned into a ",
                to_string(t.to), ", not a ", to_string(t.from), " one");
    return redistribute::to_partial(local, t);
  }
  if (is_replicate(t.from)) return redistribute::slice(local, t);
  if (is_replicate(t.to)) return redistribute::all_gather(local, t);
  const auto inner = [](const Placement& p) { return std::holds_alternative<Shard>(p) && std::get<Shard>(p).dim > 0; };
  if (std::holds_alternative<Shard>(t.from) && std::holds_alternative<Shard>(t.to)) return redistribute::all_to_all(local, t);
  return inner(t.from) || inner(t.to) ? through(Shard{0}) : redistribute::move_ranges(local, t);
}

Transition make_transition(const Spec& spec, const Placements& current, const RedistributeStep& step, std::string_view label) {
  const auto& mesh = spec.mesh();
  auto view = view_without(spec.sizes(), mesh.shape(), *mesh.coordinate(), current, step.mesh_dim);
  const auto shift = [&view](Placement placement) {
    if (auto* shard = std::get_if<Shard>(&placement)) shard->dim -= view.flattened;
    return placement;
  };
  return Transition{mesh,           step.mesh_dim,     std::move(view.sizes), shift(current[step.mesh_dim]),
                    shift(step.to), std::string(label)};
}

bool share_dim(const Placement& a, const Placement& b) {
  const auto largest = [](const Placement& p) -> int64_t {
    if (const auto* shard = std::get_if<Shard>(&p)) return shard->dim;
    if (const auto* ragged = std::get_if<RaggedShard>(&p)) return ragged->dim;
    return -1;
  };
  for (int64_t d = 0; d <= std::min(largest(a), largest(b)); ++d) {
    if (shards_dim(a, d) && shards_dim(b, d)) return true;
  }
  return false;
}

bool admissible(const Placements& current, const Placements& to, size_t i) {
  for (size_t j = i + 1; j < current.size(); ++j) {
    if (share_dim(current[j], current[i]) || share_dim(current[j], to[i])) return false;
  }
  for (size_t k = 0; k < i; ++k) {
    if (current[k] != to[k] && (share_dim(current[k], to[i]) || share_dim(to[k], to[i]))) return false;
  }
  return true;
}

/// Moves that shrink the data before those that keep or grow it; all reductions before a new Partial.
int urgency(const Placement& from, const Placement& to) {
  if (is_sharded(to)) return is_sharded(from) ? 1 : 0;
  if (is_partial(from)) return 2;
  return is_partial(to) ? 4 : 3;
}

bool blocks_outer(const Placements& current, const Placements& to, size_t i) {
  for (size_t k = 0; k < i; ++k) {
    if (current[k] != to[k] && (share_dim(current[i], current[k]) || share_dim(current[i], to[k]))) return true;
  }
  return false;
}

} // namespace

std::vector<RedistributeStep> plan_redistribute(const Placements& from, const Placements& to) {
  std::vector<RedistributeStep> steps;
  auto current = from;
  while (current != to) {
    TORCH_INTERNAL_ASSERT(steps.size() <= 3 * from.size(), "no way from ", to_string(from), " to ", to_string(to));
    std::optional<RedistributeStep> best;
    for (size_t i = 0; i < current.size(); ++i) {
      if (current[i] == to[i] || !admissible(current, to, i)) continue;
      const auto next = is_partial(current[i]) && is_partial(to[i]) ? Placement(Replicate{}) : to[i];
      if (!best || urgency(current[i], next) < urgency(current[best->mesh_dim], best->to)) best = RedistributeStep{i, next};
    }
    for (size_t i = current.size(); !best && i-- > 0;) { // blocked: the innermost split in the way is undone
      if (blocks_outer(current, to, i)) best = RedistributeStep{i, Replicate{}};
    }
    TORCH_INTERNAL_ASSERT(best);
    current[best->mesh_dim] = best->to;
    steps.push_back(*best);
  }
  return steps;
}

at::Tensor redistribute_local(const at::Tensor& local, const Spec& from, const Spec& to, std::string_view label) {
  TORCH_CHECK(from.mesh() == to.mesh(), label, ": a tensor cannot move between meshes: ", from.to_string(), " to ",
              to.to_string());
  if (!from.on_mesh()) return local;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto result = local;
  auto current = from.placements();
  for (const auto& step : plan_redistribute(from.placements(), to.placements())) {
    result = apply(result, make_transition(from, current, step, label));
    current[step.mesh_dim] = step.to;
  }
  return result;
}

at::Tensor redistribute_local(const at::Tensor& dtensor, DTensorMeta& meta, const SpecPtr& to, std::string_view label) {
  static std::mutex mutex;
  const bool keep = meta.spec->numel() == 1 && meta.spec->has_partial() && !dtensor.is_inference();
  if (keep) {
    std::lock_guard lock(mutex);
    if (meta.reduced && meta.reduced->spec == to && meta.reduced->version == dtensor._version()) return meta.reduced->local;
  }
  auto result = redistribute_local(meta.local, *meta.spec, *to, label);
  if (keep && to->is_replicated()) {
    auto value = std::make_shared<const ReducedValue>(ReducedValue{result, to, static_cast<uint32_t>(dtensor._version())});
    std::lock_guard lock(mutex);
    meta.reduced = std::move(value);
  }
  return result;
}

double redistribute_cost(const Placement& from, const Placement& to, double bytes, int64_t ranks) {
  constexpr double kLatency = 16384;  // bytes that move in the time a collective takes to start
  constexpr double kLocal = 1.0 / 64; // of moving a byte: touching it in memory
  if (from == to) return 0;
  const bool to_norm = is_partial(to) && std::get<Partial>(to).op == Partial::Op::kNorm;
  if (to_norm && is_sharded(from)) return std::numeric_limits<double>::infinity();
  if (is_partial(to)) {
    const double local = kLocal * bytes;
    return is_partial(from) ? redistribute_cost(from, Replicate{}, bytes, ranks) + local : local;
  }
  if (is_replicate(from)) return kLocal * bytes / static_cast<double>(ranks);
  if (ranks == 1) return kLocal * bytes;
  const double others = static_cast<double>(ranks - 1) / static_cast<double>(ranks);
  if (is_partial(from)) return kLatency + bytes * others * (is_replicate(to) ? 2 : 1);
  if (is_replicate(to)) return kLatency + bytes * others;
  return kLatency + bytes * others / static_cast<double>(ranks);
}

} // namespace tessera
