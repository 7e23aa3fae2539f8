#include <tessera/dtensor/redistribute/route.h>

#include <algorithm>
#include <limits>

#include <tessera/dtensor/layout/sharding_math.h>

namespace tessera::internal::redistribute {

namespace {

constexpr double kLatency = 16384;  // bytes that move in the time a collective takes to start
constexpr double kLocal = 1.0 / 64; // of moving a byte: touching it in memory

/// Elements of dim `dim` on the rank that holds most, of `size` split by `factor` chunks over `ranks`.
int64_t most(int64_t size, int64_t factor, int64_t ranks) {
  int64_t total = 0;
  for (const auto& part : strided_extents(size, factor, ranks, 0)) total += part.size;
  return total;
}

/// Elements of the largest part.
double largest_part(const Placement& placement, const std::vector<int64_t>& sizes, int64_t ranks) {
  const auto others = [&](int64_t dim) {
    double result = 1;
    for (size_t d = 0; d < sizes.size(); ++d) result *= static_cast<int64_t>(d) == dim ? 1 : static_cast<double>(sizes[d]);
    return result;
  };
  if (const auto* shard = std::get_if<Shard>(&placement)) {
    return static_cast<double>(chunk_extent(sizes[shard->dim], ranks, 0).size) * others(shard->dim);
  }
  if (const auto* strided = std::get_if<StridedShard>(&placement)) {
    return static_cast<double>(most(sizes[strided->dim], strided->split_factor, ranks)) * others(strided->dim);
  }
  if (const auto* ragged = std::get_if<RaggedShard>(&placement)) {
    const auto largest = ragged->extents.largest();
    return static_cast<double>(largest) * static_cast<double>(product(sizes, ragged->dim + 1, sizes.size()));
  }
  return others(-1);
}

bool on_one_rank(const Placement& placement) {
  const auto* ragged = std::get_if<RaggedShard>(&placement);
  return ragged && std::count_if(ragged->extents.begin(), ragged->extents.end(), [](int64_t extent) { return extent > 0; }) == 1;
}

/// What `move` costs; as `price`.
double price(Move move, const Placement& from, const Placement& to, const MoveSize& size, int64_t ranks) {
  if (move == Move::kNone) return 0;
  if (move == Move::kImpossible) return std::numeric_limits<double>::infinity();
  // Without elements too it costs something to change a placement.
  const double whole = std::max(1.0, largest_part(Replicate{}, size.sizes, ranks)) * size.element;
  const double local = kLocal * whole;
  if (move == Move::kToPartial) return local;
  if (move == Move::kSlice || ranks == 1) return local / static_cast<double>(ranks);
  const auto padded = [&](const Placement& p) {
    return largest_part(p, size.sizes, ranks) * size.element * static_cast<double>(ranks);
  };
  const double others = static_cast<double>(ranks - 1) / static_cast<double>(ranks);
  switch (move) {
    case Move::kAllReduce: return kLatency + others * 2 * whole;
    case Move::kAllGather: return kLatency + others * (on_one_rank(from) ? whole : padded(from));
    case Move::kReduceScatter: return kLatency + others * padded(to);
    case Move::kAllToAll:
    case Move::kMoveRanges: return kLatency + others * std::max(padded(from), padded(to)) / static_cast<double>(ranks);
    case Move::kNone:
    case Move::kSlice:
    case Move::kToPartial:
    case Move::kImpossible: break; // see above
  }
  return local;
}

Move to_replicate(const Placement& from) { return is_partial(from) ? Move::kAllReduce : Move::kAllGather; }

} // namespace

Route choose_route(const Placement& from, const Placement& to) {
  static const Placement replicate = Replicate{}, rows = Shard{0};
  if (from == to || same_value(from, to)) return {};
  if ((is_strided(from) && is_sharded(to)) || (is_strided(to) && is_sharded(from)))
    return {to_replicate(from), &replicate, Move::kSlice};
  if (is_partial(to)) {
    if (is_partial(from)) return {Move::kAllReduce, &replicate, Move::kToPartial};
    const bool to_norm = std::get<Partial>(to).op == Partial::Op::kNorm;
    return {to_norm && is_sharded(from) ? Move::kImpossible : Move::kToPartial};
  }
  if (is_replicate(to)) return {to_replicate(from)};
  if (is_partial(from)) return {Move::kReduceScatter};
  if (is_replicate(from)) return {Move::kSlice};
  const auto *from_shard = std::get_if<Shard>(&from), *to_shard = std::get_if<Shard>(&to);
  if (from_shard && to_shard) return {Move::kAllToAll};
  if (from_shard && from_shard->dim > 0) return {Move::kAllToAll, &rows, Move::kMoveRanges};
  if (to_shard && to_shard->dim > 0) return {Move::kMoveRanges, &rows, Move::kAllToAll};
  return {Move::kMoveRanges};
}

double price(const Route& route, const Placement& from, const Placement& to, const MoveSize& size, int64_t ranks) {
  if (!route.middle) return price(route.first, from, to, size, ranks);
  return price(route.first, from, *route.middle, size, ranks) + price(route.second, *route.middle, to, size, ranks);
}

MoveSize move_size(const std::vector<int64_t>& sizes, double element, const Placements& others, const std::vector<int64_t>& ranks,
                   const std::vector<size_t>& mesh_dims) {
  MoveSize result{sizes, element};
  for (size_t m = 0; m < others.size(); ++m) {
    if (std::find(mesh_dims.begin(), mesh_dims.end(), m) != mesh_dims.end()) continue;
    if (const auto* shard = std::get_if<Shard>(&others[m])) {
      result.sizes[shard->dim] = chunk_extent(result.sizes[shard->dim], ranks[m], 0).size;
    } else if (const auto* strided = std::get_if<StridedShard>(&others[m])) {
      result.sizes[strided->dim] = most(result.sizes[strided->dim], strided->split_factor, ranks[m]);
    } else if (const auto* ragged = std::get_if<RaggedShard>(&others[m])) {
      const auto largest = ragged->extents.largest();
      const auto all = ragged->extents.sum_before(ragged->extents.size());
      if (all > 0) result.element *= static_cast<double>(largest) / static_cast<double>(all);
    }
  }
  return result;
}

} // namespace tessera::internal::redistribute
