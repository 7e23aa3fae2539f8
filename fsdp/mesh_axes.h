#pragma once

// Internal: which dims of a mesh shard and which replicate.

#include <tessera/dtensor/placement.h>
#include <tessera/mesh/device_mesh.h>

namespace tessera::fsdp_internal {

/// The data-parallel roles of a mesh: parameters are split over the shard axis and repeated over the replicate axis (FSDP2:
/// HSDP).
class MeshAxes {
 public:
  /// 1-D: sharded over it; 2-D: replicated over dim 0, sharded over dim 1.
  static MeshAxes sharded(const DeviceMesh& mesh);
  /// Every dim replicates (data parallel without sharding).
  static MeshAxes replicated(const DeviceMesh& mesh);

  const DeviceMesh& mesh() const { return mesh_; }
  int shard_ranks() const { return shard_ranks_; }
  int shard_rank() const { return shard_rank_; }
  int replicate_ranks() const { return replicate_ranks_; }

  /// Null when the axis has one rank. All-gathers and reduce-scatters use communicators of their own, so that they overlap.
  const CommunicatorPtr& all_gather() const { return all_gather_; }
  const CommunicatorPtr& reduce_scatter() const { return reduce_scatter_; }
  const CommunicatorPtr& all_reduce() const { return all_reduce_; }

  /// One placement a mesh dim: `along_shard` on the shard axis, Replicate elsewhere.
  Placements placements(const Placement& along_shard) const;

 private:
  MeshAxes(const DeviceMesh& mesh, int64_t shard_dim, int64_t replicate_dim);

  DeviceMesh mesh_;
  int64_t shard_dim_; // -1: none
  int shard_ranks_ = 1, shard_rank_ = 0, replicate_ranks_ = 1;
  CommunicatorPtr all_gather_, reduce_scatter_, all_reduce_;
};

} // namespace tessera::fsdp_internal
