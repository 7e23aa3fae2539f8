#include <tessera/collectives/backends/simulated/cost.h>

#include <algorithm>
#include <cmath>
#include <map>

namespace tessera::internal {

namespace {

double log2_of(int64_t ranks) { return std::ceil(std::log2(static_cast<double>(ranks))); }

/// Messages that follow each other in an exchange of parts among `ranks`.
double steps_of(const Link& link, int64_t ranks) {
  return link.algorithm == Link::Algorithm::kRing ? static_cast<double>(ranks - 1) : log2_of(ranks);
}

/// The kinds of link that a group uses. Of a node's link each of its ranks has a share: groups of other ranks of the same nodes
/// run the same collective at the same time.
struct Level {
  Wire wire;
  Link link;
  int64_t members;    ///< that exchange along it
  double sharing = 1; ///< how many ranks use a link at once

  Phase phase(double steps, double bytes) const { return {wire, steps * link.alpha, sharing * bytes * link.beta}; }
  double others() const { return static_cast<double>(members - 1) / static_cast<double>(members); }
};

/// Each member ends with all `bytes`, or begins with them and ends with the reduction of its part.
Phase exchange_parts(const Level& level, double bytes) {
  return level.phase(steps_of(level.link, level.members), level.others() * bytes);
}

/// A binomial tree, or a scatter and an all-gather: what is faster.
Phase broadcast(const Level& level, double bytes) {
  const double depth = log2_of(level.members);
  const auto tree = level.phase(depth, depth * bytes);
  const auto scattered = level.phase(depth + steps_of(level.link, level.members), 2 * level.others() * bytes);
  return tree.latency + tree.transfer <= scattered.latency + scattered.transfer ? tree : scattered;
}

std::vector<Phase> all_reduce(const Level& inner, const Level& outer, double bytes) {
  const double part = bytes / static_cast<double>(inner.members);
  const auto in = exchange_parts(inner, bytes), out = exchange_parts(outer, part);
  return {in, out, out, in};
}

} // namespace

GroupShape GroupShape::of(const RankList& ranks, const Topology& topology) {
  const int64_t size = topology.ranks_per_node;
  if (const auto stride = ranks.stride(); stride && *stride > 0) { // the groups of most meshes, however large
    if (*stride >= size) return {ranks.size(), 1};
    const auto [first, last] = ranks.range();
    const int64_t nodes = last / size - first / size + 1, a_node = (size + *stride - 1) / *stride;
    const int64_t on_first = std::min(ranks.size(), (size - first % size + *stride - 1) / *stride);
    return {nodes, nodes > 2 ? a_node : std::max(on_first, ranks.size() - on_first)};
  }
  std::map<int64_t, int64_t> on_node;
  int64_t most = 0;
  for (const auto rank : ranks.expanded()) most = std::max(most, ++on_node[rank / size]);
  return {static_cast<int64_t>(on_node.size()), most};
}

std::vector<Phase> phases_of(CollectiveKind kind, int64_t payload, const GroupShape& group, const Topology& topology) {
  const auto bytes = static_cast<double>(payload);
  const Level inner{Wire::kInNode, topology.in_node, group.ranks_a_node};
  const auto node_ranks = static_cast<double>(std::min(topology.ranks_per_node, topology.ranks));
  const Level outer{Wire::kBetweenNodes, topology.between_nodes, group.nodes, node_ranks};
  const double inner_part = bytes / static_cast<double>(group.ranks_a_node);
  const Level& widest = group.nodes > 1 ? outer : inner;
  switch (kind) {
    case CollectiveKind::kAllGather: return {exchange_parts(outer, inner_part), exchange_parts(inner, bytes)};
    case CollectiveKind::kReduceScatter: return {exchange_parts(inner, bytes), exchange_parts(outer, inner_part)};
    case CollectiveKind::kAllReduce: return all_reduce(inner, outer, bytes);
    case CollectiveKind::kBroadcast: {
      auto one = outer;
      one.sharing = 1; // one rank of a node takes it, and hands it on
      return {broadcast(one, bytes), broadcast(inner, bytes)};
    }
    case CollectiveKind::kAllToAll: {
      const auto ranks = static_cast<double>(group.nodes * group.ranks_a_node);
      const double to_node = bytes / ranks * static_cast<double>(group.ranks_a_node);
      return {outer.phase(ranks - static_cast<double>(group.ranks_a_node), bytes - to_node),
              inner.phase(static_cast<double>(group.ranks_a_node - 1), inner.others() * to_node)};
    }
    case CollectiveKind::kBarrier: return {outer.phase(log2_of(group.nodes), 0), inner.phase(log2_of(group.ranks_a_node), 0)};
    case CollectiveKind::kSend:
    case CollectiveKind::kReceive: return {widest.phase(1, bytes)};
  }
  return {};
}

} // namespace tessera::internal
