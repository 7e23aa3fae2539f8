#pragma once

#include <tessera/collectives/counters.h>
#include <tessera/collectives/rank_list.h>
#include <tessera/collectives/topology.h>

#include <cstdint>
#include <vector>

namespace tessera::internal {

/// How many nodes the ranks of a group are on, and at most how many are on one.
struct GroupShape {
  int64_t nodes = 1;
  int64_t ranks_a_node = 1;

  static GroupShape of(const RankList& ranks, const Topology& topology);
};

enum class Wire { kInNode, kBetweenNodes };

/// A part of a collective on one kind of link: messages that follow each other, and the bytes that they carry.
struct Phase {
  Wire wire = Wire::kInNode;
  double latency = 0;  ///< seconds in which the link is free for others
  double transfer = 0; ///< seconds in which it is not
};

/// What a collective of `bytes` (the larger of input and output; of an all-to-all what a rank has for all) costs each rank of the
/// group: its phases, one after another. The group of a message is its two ranks. docs/simulated_cluster.md has the formulas and
/// their sources.
std::vector<Phase> phases_of(CollectiveKind kind, int64_t bytes, const GroupShape& group, const Topology& topology);

} // namespace tessera::internal
