#pragma once

// Internal: which moves lead from one placement to another on one mesh dim. Chosen here alone; plan.cpp prices the choice, and
// redistribute.cpp runs it.

#include <cstdint>
#include <vector>

#include <tessera/dtensor/placement.h>

namespace tessera::internal::redistribute {

/// The functions of transition.h.
enum class Move {
  kNone,
  kSlice,
  kToPartial,
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kAllToAll,
  kMoveRanges,
  kImpossible, ///< from a split to a p-norm: only by way of Replicate
};

/// `first`, or `first` to `*middle` and `second` from there.
struct Route {
  Move first = Move::kNone;
  const Placement* middle = nullptr; ///< lives as long as the process
  Move second = Move::kNone;
};
Route choose_route(const Placement& from, const Placement& to);

/// What a move on one mesh dim moves: the tensor without that mesh dim's split, on the rank that holds most of it.
struct MoveSize {
  std::vector<int64_t> sizes;
  double element; ///< bytes; less where a RaggedShard of another mesh dim divides several dims
};
/// `others`: the placements on the mesh dims of shape `ranks`; those of `mesh_dims` do not count. The same on every rank.
MoveSize move_size(const std::vector<int64_t>& sizes, double element, const Placements& others, const std::vector<int64_t>& ranks,
                   const std::vector<size_t>& mesh_dims);

/// What `route` costs on `ranks` ranks, in bytes: what the rank that holds most sends to others, padding included (an all-reduce
/// is a reduce-scatter and an all-gather), and the latency of the collectives. Infinite where it is impossible.
double price(const Route& route, const Placement& from, const Placement& to, const MoveSize& size, int64_t ranks);

} // namespace tessera::internal::redistribute
