#pragma once

// Internal: which dims of a mesh shard and which replicate.

#include <utility>

#include <tessera/dtensor/placement.h>
#include <tessera/fsdp/options.h>
#include <tessera/fsdp/strategy.h>
#include <tessera/mesh/device_mesh.h>

namespace tessera::internal {

/// What `fully_shard` does on a mesh where nothing else is asked for: full sharding on one dim, hybrid on two. An error for more.
Strategy default_strategy(const DeviceMesh& mesh);

/// The data-parallel roles of a mesh, and the communicators of the collectives. All-gathers and reduce-scatters use communicators
/// of their own, so that they overlap, or share one. One is null where its axis has one rank or its strategy does not need it.
///
/// A sharded state is split over the shard axis: the mesh's last dim, or for a hierarchical strategy all ranks, those of one
/// inner group next to each other's places: shard number = inner rank × outer ranks + outer rank. So a gather between the inner
/// groups makes what an inner rank owns, contiguous, and the gather inside the group the whole; a reduction goes the other way.
class MeshAxes {
 public:
  /// An error where the mesh has not the dims that the strategy has entries for.
  MeshAxes(Strategy strategy, const DeviceMesh& mesh, CommunicatorUse use = CommunicatorUse::kSeparate);

  /// The mesh of the DTensors: the one given, or for a hierarchical strategy one dim of all its ranks in the order of their
  /// shards.
  const DeviceMesh& mesh() const { return mesh_; }
  Strategy strategy() const { return strategy_; }
  /// Whether this rank is the first along every dim of the mesh: it warns for all of them.
  bool is_first_rank() const;
  /// Parameters that are sharded for the optimizer alone stay gathered from one of its steps to the next.
  bool keeps_parameters() const { return !states().parameters && states().optimizer_state; }
  /// Gradients that are whole wait for the last backward of an accumulation.
  bool keeps_gradients() const { return !states().gradients; }
  int shard_ranks() const { return shard_ranks_; }
  int shard_rank() const { return shard_rank_; }
  /// Ranks between which a hierarchical strategy gathers and reduces apart from those inside a group; 1 for any other.
  int outer_ranks() const { return outer_ranks_; }

  const CommunicatorPtr& all_gather() const { return all_gather_; }
  const CommunicatorPtr& reduce_scatter() const { return reduce_scatter_; }
  /// Reduces over replicas, after the reduce-scatter.
  const CommunicatorPtr& all_reduce() const { return all_reduce_; }
  /// These go between the groups of a hierarchical strategy: before the all-gather, and after the reduce-scatter.
  const CommunicatorPtr& outer_all_gather() const { return outer_all_gather_; }
  const CommunicatorPtr& outer_reduce_scatter() const { return outer_reduce_scatter_; }
  /// Others in their place, of the same ranks in the same order.
  void replace_all_gather(CommunicatorPtr communicator) { all_gather_ = std::move(communicator); }
  void replace_reduce_scatter(CommunicatorPtr communicator) { reduce_scatter_ = std::move(communicator); }
  /// Whether a second collective follows the reduce-scatter.
  bool reduces_twice() const { return all_reduce_ || outer_reduce_scatter_; }
  bool reduces() const { return reduce_scatter_ || reduces_twice(); }
  /// How many ranks' gradients are added in all.
  int reducing_ranks() const;
  /// Whether the reductions average this dtype as well as a sum that is divided after it.
  bool averages(at::ScalarType dtype) const;

  /// Connects `ranks` neighbours on the shard axis, for an integer `reshard_after_forward`. Every rank of the axis calls it. An
  /// error unless `ranks` divides those of the axis.
  CommunicatorPtr neighbours(int64_t ranks) const;

  /// One placement a mesh dim: `along_shard` on the shard axis, Replicate elsewhere.
  Placements placements(const Placement& along_shard) const;

 private:
  CommunicatorPtr connect(const DeviceMesh& mesh, int64_t dim, const char* purpose) const;
  const ShardedStates& states() const { return row_of(strategy_).inner; }
  void shard_over(const DeviceMesh& mesh, int64_t dim);
  void shard_hierarchically(const DeviceMesh& mesh);

  Strategy strategy_;
  CommunicatorUse use_;
  DeviceMesh mesh_;
  int64_t shard_dim_ = -1; // of `mesh_`; -1: none
  int shard_ranks_ = 1, shard_rank_ = 0, outer_ranks_ = 1;
  CommunicatorPtr all_gather_, reduce_scatter_, all_reduce_, outer_all_gather_, outer_reduce_scatter_;
};

} // namespace tessera::internal
