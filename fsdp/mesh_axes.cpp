#include <tessera/fsdp/mesh_axes.h>

#include <c10/util/Exception.h>

namespace tessera::fsdp_internal {

MeshAxes::MeshAxes(const DeviceMesh& mesh, int64_t shard_dim, int64_t replicate_dim) : mesh_(mesh), shard_dim_(shard_dim) {
  if (shard_dim >= 0) {
    shard_ranks_ = static_cast<int>(mesh.size(shard_dim));
    shard_rank_ = static_cast<int>(mesh.local_rank(shard_dim));
    if (shard_ranks_ > 1) {
      all_gather_ = mesh.communicator(shard_dim, "fsdp.all_gather");
      reduce_scatter_ = mesh.communicator(shard_dim, "fsdp.reduce_scatter");
    }
  }
  if (replicate_dim >= 0) {
    replicate_ranks_ = static_cast<int>(mesh.size(replicate_dim));
    if (replicate_ranks_ > 1) all_reduce_ = mesh.communicator(replicate_dim, "fsdp.all_reduce");
  }
}

MeshAxes MeshAxes::sharded(const DeviceMesh& mesh) {
  TORCH_CHECK_VALUE(mesh.ndim() == 1 || mesh.ndim() == 2,
                    "fully_shard takes a 1-D mesh (shard) or a 2-D mesh (replicate, shard), but the mesh has ", mesh.ndim(),
                    " dims: ", mesh.to_string());
  return mesh.ndim() == 1 ? MeshAxes(mesh, 0, -1) : MeshAxes(mesh, 1, 0);
}

MeshAxes MeshAxes::replicated(const DeviceMesh& mesh) {
  TORCH_CHECK_VALUE(mesh.ndim() == 1, "replicate takes a 1-D mesh, but the mesh has ", mesh.ndim(), " dims: ", mesh.to_string());
  return MeshAxes(mesh, -1, 0);
}

Placements MeshAxes::placements(const Placement& along_shard) const {
  Placements placements(static_cast<size_t>(mesh_.ndim()), Replicate{});
  if (shard_dim_ >= 0) placements[static_cast<size_t>(shard_dim_)] = along_shard;
  return placements;
}

} // namespace tessera::fsdp_internal
