#pragma once

// Internal: what the dims of a mesh are to a group: which shard, which replicate, and which are foreign to data parallelism.

#include <optional>
#include <vector>

#include <tessera/dtensor/placement.h>
#include <tessera/fsdp/strategy.h>
#include <tessera/mesh/device_mesh.h>

namespace tessera::internal {

/// What `fully_shard` does on a mesh where nothing else is asked for: full sharding where there are only inner dims, otherwise
/// hybrid. Without `dims` these are one dim and two; an error for more.
Strategy default_strategy(const DeviceMesh& mesh, const std::optional<DataParallelDims>& dims);

/// The dims of `mesh` that `dims` names, in the mesh's order; without `dims` all. An error for names that the mesh does not have.
DeviceMesh data_parallel_mesh(const DeviceMesh& mesh, const std::optional<DataParallelDims>& dims);

/// The dims of a mesh for which a strategy has one entry, as if they were one dim.
struct DimRole {
  DeviceMesh ranks;     ///< 1-D: the ranks that differ from this one only along the dims
  ShardedStates states; ///< the states that are split over these ranks

  /// Whether each rank has a part of the parameters, as the optimizer sees them. Otherwise the ranks are replicas.
  bool shards() const { return states.optimizer_state; }
};

/// The roles that a strategy's row gives the dims of a mesh. Nothing is communicated.
///
/// A sharded state is split over the shard axis: all dims that shard, as one. The ranks of an inner group are next to each
/// other's places in it: shard number = inner rank × outer ranks + outer rank. So a gather between the inner groups makes what an
/// inner rank owns, contiguous, and the gather inside the group makes the whole. A reduction goes the other way.
class MeshRoles {
 public:
  /// Dims of `mesh` that `dims` does not name are foreign. Without `dims` the last dim is the inner one, and the first of two is
  /// the outer one. An error where the dims are not those for which the strategy has entries.
  MeshRoles(const DeviceMesh& mesh, Strategy strategy, const std::optional<DataParallelDims>& dims = std::nullopt);

  /// The data-parallel dims, in the order of the mesh that was given.
  const DeviceMesh& data_parallel() const { return data_parallel_; }
  /// The mesh of the DTensors: the data-parallel dims, where those that shard are one dim, in the order of the shards.
  const DeviceMesh& mesh() const { return mesh_; }
  /// The outermost first.
  const std::vector<DimRole>& roles() const { return roles_; }
  Strategy strategy() const { return strategy_; }
  /// Whether this rank is the first along every data-parallel dim: it warns for all of them.
  bool is_first_rank() const;

  /// The dim of `mesh()` that is the shard axis; none where nothing is sharded.
  const std::optional<int64_t>& shard_dim() const { return shard_dim_; }
  bool shards() const { return shard_dim_.has_value(); }
  int shard_ranks() const { return shard_ranks_; }
  int shard_rank() const { return shard_rank_; }
  /// The communicator of all ranks of the shard axis, in the order of the shards. Every one of them calls it. Null where nothing
  /// is sharded.
  CommunicatorPtr shard_communicator() const { return shards() ? mesh_.communicator(*shard_dim_) : nullptr; }
  /// Whether parameters that are sharded for the optimizer alone stay gathered from one of its steps to the next.
  bool keeps_parameters() const { return roles_.back().shards() && !roles_.back().states.parameters; }
  /// Whether gradients are whole and wait for the last backward of an accumulation.
  bool keeps_gradients() const { return !roles_.back().states.gradients; }

  /// One placement a dim of `mesh()`: `along_shard` on the shard axis, Replicate elsewhere.
  Placements placements(const Placement& along_shard) const;

 private:
  void place_shards(const DeviceMesh& mesh, const std::vector<int64_t>& replicas, const std::vector<int64_t>& shards);

  Strategy strategy_;
  std::vector<DimRole> roles_;
  DeviceMesh data_parallel_, mesh_;
  std::optional<int64_t> shard_dim_; // of `mesh_`
  int shard_ranks_ = 1, shard_rank_ = 0;
};

} // namespace tessera::internal
