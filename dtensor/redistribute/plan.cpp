#include <algorithm>
#include <limits>

#include <tessera/dtensor/layout/sharding_math.h>
#include <tessera/dtensor/redistribute/redistribute.h>

namespace tessera::internal {

namespace {

constexpr double kStep = 1; // in bytes: fewer steps where all else is equal

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

  std::vector<RedistributeStep> steps() {
    const int last = last_node();
    TORCH_INTERNAL_ASSERT(last >= 0, "no way from ", to_string(nodes_[0].state), " to ", to_string(to_));
    return path_to(last);
  }
  double price() {
    const int last = last_node();
    return last < 0 ? std::numeric_limits<double>::infinity() : nodes_[last].cost;
  }

 private:
  struct Node {
    Placements state;
    double cost;
    int parent;
    RedistributeStep step;
    bool done;
  };

  /// Finds the last node of a cheapest path; -1 where there is none.
  int last_node() {
    for (;;) {
      const int next = cheapest();
      if (next < 0 || nodes_[next].state == to_) return next;
      nodes_[next].done = true;
      for (size_t i = 0; i < to_.size(); ++i) {
        for (const auto& choice : choices_[i]) {
          if (allowed(nodes_[next].state, i, choice)) consider(next, {i}, choice);
        }
      }
      consider_all(next);
    }
  }

  int cheapest() const {
    int best = -1;
    for (size_t n = 0; n < nodes_.size(); ++n) {
      if (!nodes_[n].done && (best < 0 || nodes_[n].cost < nodes_[best].cost)) best = static_cast<int>(n);
    }
    return best;
  }

  /// A split of an outer mesh dim only changes while no inner one splits the same tensor dim.
  bool allowed(const Placements& state, size_t i, const Placement& to) const {
    if (state[i] == to || (is_partial(state[i]) && is_partial(to) && !same_value(state[i], to))) return false;
    for (size_t j = 0; j < state.size(); ++j) {
      if (j == i) continue;
      if (!may_coexist(j < i ? state[j] : to, j < i ? to : state[j])) return false;
      if (j > i && (shared_dim(state[j], state[i]) || shared_dim(state[j], to))) return false;
    }
    const Placements outer(state.begin(), state.begin() + static_cast<int64_t>(i));
    return splits_largest(to, outer, sizes_, ranks_); // perhaps a part that the outer mesh dims have not made yet
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
    const auto size = redistribute::move_size(sizes_, element_, state, ranks_, several_);
    for (const auto& to : {choices_[several_[0]][1], Placement(Replicate{})}) {
      const bool fits = std::all_of(state.begin(), state.end(), [&](const auto& other) {
        const auto i = static_cast<size_t>(&other - state.begin());
        return ranks_[i] > 1 || (may_coexist(other, to) && !shared_dim(other, to) && !shared_dim(other, from));
      });
      if (from == to || !fits || is_partial(to) || is_replicate(from)) continue;
      if (nests(from, size.sizes, ranks) && nests(to, size.sizes, ranks)) consider(parent, several_, to);
    }
  }

  void consider(int parent, const std::vector<size_t>& mesh_dims, const Placement& to) {
    const auto& state = nodes_[parent].state;
    int64_t ranks = 1;
    for (const auto i : mesh_dims) ranks *= ranks_[i];
    const auto size = redistribute::move_size(sizes_, element_, state, ranks_, mesh_dims);
    const auto& from = state[mesh_dims[0]];
    const auto route = redistribute::choose_route(from, to);
    const auto cost = nodes_[parent].cost + kStep + redistribute::price(route, from, to, size, ranks);
    if (cost == std::numeric_limits<double>::infinity()) return;
    auto next = state;
    for (const auto i : mesh_dims) next[i] = to;
    const auto known = std::find_if(nodes_.begin(), nodes_.end(), [&](const Node& node) { return node.state == next; });
    if (known == nodes_.end()) {
      nodes_.push_back({std::move(next), cost, parent, {mesh_dims, to, route}, false});
    } else if (!known->done && cost < known->cost) {
      known->cost = cost;
      known->parent = parent;
      known->step = {mesh_dims, to, route};
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

} // namespace

std::vector<RedistributeStep> plan_redistribute(const Placements& from, const Placements& to, const std::vector<int64_t>& ranks,
                                                const std::vector<int64_t>& sizes, double element) {
  return Search(from, to, ranks, sizes, element).steps();
}

double redistribute_price(const Placements& from, const Placements& to, const std::vector<int64_t>& ranks,
                          const std::vector<int64_t>& sizes, double element) {
  return Search(from, to, ranks, sizes, element).price();
}

} // namespace tessera::internal
