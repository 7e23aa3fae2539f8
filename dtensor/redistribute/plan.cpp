#include <algorithm>
#include <limits>

#include <tessera/dtensor/redistribute/redistribute.h>
#include <tessera/dtensor/sharding_math.h>

namespace tessera {

namespace {

constexpr double kLatency = 16384;  // bytes that move in the time a collective takes to start
constexpr double kLocal = 1.0 / 64; // of moving a byte: touching it in memory
constexpr double kStep = 1;         // fewer steps where all else is equal

bool share_dim(const Placement& a, const Placement& b) {
  const auto largest = [](const Placement& p) -> int64_t {
    if (const auto* shard = std::get_if<Shard>(&p)) return shard->dim;
    if (const auto* strided = std::get_if<StridedShard>(&p)) return strided->dim;
    if (const auto* ragged = std::get_if<RaggedShard>(&p)) return ragged->dim;
    return -1;
  };
  for (int64_t d = 0; d <= std::min(largest(a), largest(b)); ++d) {
    if (shards_dim(a, d) && shards_dim(b, d)) return true;
  }
  return false;
}

/// The placements of two mesh dims that a tensor may have at once.
bool fit_together(const Placement& a, const Placement& b) {
  if (is_partial(a) && is_partial(b)) return reduce_together(std::get<Partial>(a), std::get<Partial>(b));
  const bool ragged = std::holds_alternative<RaggedShard>(a) || std::holds_alternative<RaggedShard>(b);
  return !ragged || !share_dim(a, b);
}

/// Each mesh dim splits one tensor dim of `sizes` evenly, so that the splits are one split over all of them.
bool nests(const Placement& placement, const std::vector<int64_t>& sizes, int64_t ranks) {
  if (!is_sharded(placement)) return true;
  const auto* shard = std::get_if<Shard>(&placement);
  return shard && sizes[shard->dim] % ranks == 0;
}

/// A cheapest path through the placements that each mesh dim may have on the way: its first, its last, Replicate, and the sum
/// that a MaskPartial is.
class Search {
 public:
  Search(const Placements& from, const Placements& to, const std::vector<int64_t>& ranks, const std::vector<int64_t>& sizes,
         double element)
      : to_(to), ranks_(ranks), sizes_(sizes), element_(element) {
    for (size_t i = 0; i < from.size(); ++i) {
      choices_.push_back({from[i], to[i], Replicate{}});
      if (same_value(from[i], Partial{})) choices_.back().emplace_back(Partial{});
      if (ranks[i] > 1) several_.push_back(i);
    }
    nodes_.push_back({from, 0, -1, {}, false});
  }

  std::vector<RedistributeStep> run() {
    for (;;) {
      const int next = cheapest();
      TORCH_INTERNAL_ASSERT(next >= 0, "no way from ", to_string(nodes_[0].state), " to ", to_string(to_));
      nodes_[next].done = true;
      if (nodes_[next].state == to_) return path_to(next);
      for (size_t i = 0; i < to_.size(); ++i) {
        for (const auto& choice : choices_[i]) {
          if (allowed(nodes_[next].state, i, choice)) consider(next, {i}, choice);
        }
      }
      consider_all(next);
    }
  }

 private:
  struct Node {
    Placements state;
    double cost;
    int parent;
    RedistributeStep step;
    bool done;
  };

  int cheapest() const {
    int best = -1;
    for (size_t n = 0; n < nodes_.size(); ++n) {
      if (!nodes_[n].done && (best < 0 || nodes_[n].cost < nodes_[best].cost)) best = static_cast<int>(n);
    }
    return best;
  }

  /// A split of an outer mesh dim only changes while no inner one splits the same tensor dim.
  static bool allowed(const Placements& state, size_t i, const Placement& to) {
    if (state[i] == to || (is_partial(state[i]) && is_partial(to) && !same_value(state[i], to))) return false;
    for (size_t j = 0; j < state.size(); ++j) {
      if (j == i) continue;
      if (!fit_together(state[j], to)) return false;
      if (j > i && (share_dim(state[j], state[i]) || share_dim(state[j], to))) return false;
    }
    return true;
  }

  /// The same move on all mesh dims of several ranks is one over all ranks.
  void consider_all(int parent) {
    if (several_.size() < 2) return;
    const auto state = nodes_[parent].state;
    const auto& from = state[several_[0]];
    int64_t ranks = 1;
    for (const auto i : several_) {
      if (state[i] != from) return;
      ranks *= ranks_[i];
    }
    const auto size = move_size(sizes_, element_, state, ranks_, several_);
    for (const auto& to : {choices_[several_[0]][1], Placement(Replicate{})}) {
      const bool fits = std::all_of(state.begin(), state.end(), [&](const auto& other) {
        const auto i = static_cast<size_t>(&other - state.begin());
        return ranks_[i] > 1 || (fit_together(other, to) && !share_dim(other, to) && !share_dim(other, from));
      });
      if (from == to || !fits || is_partial(to) || is_replicate(from)) continue;
      if (nests(from, size.sizes, ranks) && nests(to, size.sizes, ranks)) consider(parent, several_, to);
    }
  }

  void consider(int parent, const std::vector<size_t>& mesh_dims, const Placement& to) {
    const auto& state = nodes_[parent].state;
    int64_t ranks = 1;
    for (const auto i : mesh_dims) ranks *= ranks_[i];
    const auto size = move_size(sizes_, element_, state, ranks_, mesh_dims);
    const auto cost = nodes_[parent].cost + kStep + redistribute_cost(state[mesh_dims[0]], to, size, ranks);
    if (cost == std::numeric_limits<double>::infinity()) return;
    auto next = state;
    for (const auto i : mesh_dims) next[i] = to;
    const auto known = std::find_if(nodes_.begin(), nodes_.end(), [&](const Node& node) { return node.state == next; });
    if (known == nodes_.end()) {
      nodes_.push_back({std::move(next), cost, parent, {mesh_dims, to}, false});
    } else if (!known->done && cost < known->cost) {
      known->cost = cost;
      known->parent = parent;
      known->step = {mesh_dims, to};
    }
  }

  std::vector<RedistributeStep> path_to(int node) const {
    std::vector<RedistributeStep> steps;
    for (; node > 0; node = nodes_[node].parent) steps.push_back(nodes_[node].step);
    std::reverse(steps.begin(), steps.end());
    return steps;
  }

  const Placements& to_;
  const std::vector<int64_t>& ranks_;
  const std::vector<int64_t>& sizes_;
  double element_;
  std::vector<size_t> several_; ///< mesh dims of several ranks
  std::vector<std::vector<Placement>> choices_;
  std::vector<Node> nodes_;
};

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
    const auto largest = *std::max_element(ragged->extents.begin(), ragged->extents.end());
    return static_cast<double>(largest) * static_cast<double>(product(sizes, ragged->dim + 1, sizes.size()));
  }
  return others(-1);
}

bool on_one_rank(const Placement& placement) {
  const auto* ragged = std::get_if<RaggedShard>(&placement);
  return ragged && std::count_if(ragged->extents.begin(), ragged->extents.end(), [](int64_t extent) { return extent > 0; }) == 1;
}

} // namespace

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
      const auto largest = *std::max_element(ragged->extents.begin(), ragged->extents.end());
      const auto all = product(sizes, 0, ragged->dim + 1);
      if (all > 0) result.element *= static_cast<double>(largest) / static_cast<double>(all);
    }
  }
  return result;
}

std::vector<RedistributeStep> plan_redistribute(const Placements& from, const Placements& to, const std::vector<int64_t>& ranks,
                                                const std::vector<int64_t>& sizes, double element) {
  return Search(from, to, ranks, sizes, element).run();
}

double redistribute_cost(const Placement& from, const Placement& to, const MoveSize& size, int64_t ranks) {
  if (from == to || same_value(from, to)) return 0;
  const auto through = [&](const Placement& middle) {
    return redistribute_cost(from, middle, size, ranks) + redistribute_cost(middle, to, size, ranks);
  };
  if ((is_strided(from) && is_sharded(to)) || (is_strided(to) && is_sharded(from))) return through(Replicate{});
  const bool to_norm = is_partial(to) && std::get<Partial>(to).op == Partial::Op::kNorm;
  if (to_norm && is_sharded(from)) return std::numeric_limits<double>::infinity();
  const double whole = largest_part(Replicate{}, size.sizes, ranks) * size.element;
  const double local = kLocal * whole;
  if (is_partial(to)) return is_partial(from) ? redistribute_cost(from, Replicate{}, size, ranks) + local : local;
  if (is_replicate(from) || ranks == 1) return local / static_cast<double>(ranks);
  const auto padded = [&](const Placement& p) {
    return largest_part(p, size.sizes, ranks) * size.element * static_cast<double>(ranks);
  };
  const double others = static_cast<double>(ranks - 1) / static_cast<double>(ranks);
  if (is_replicate(to)) return kLatency + others * (is_partial(from) ? 2 * whole : on_one_rank(from) ? whole : padded(from));
  if (is_partial(from)) return kLatency + others * padded(to);
  const auto inner = [](const Placement& p) { return std::holds_alternative<Shard>(p) && std::get<Shard>(p).dim > 0; };
  const bool both_shards = std::holds_alternative<Shard>(from) && std::holds_alternative<Shard>(to);
  if (!both_shards && (inner(from) || inner(to))) return through(Shard{0});
  return kLatency + others * std::max(padded(from), padded(to)) / static_cast<double>(ranks);
}

} // namespace tessera
