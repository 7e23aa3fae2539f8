#pragma once

// Meshes of replicas, shards, parts of sequences and parts of layers.

#include <cstdint>
#include <string>
#include <vector>

#include <tessera/mesh/device_mesh.h>

#include <tessera/tests/support/test_device.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing {

/// A mesh of all dims, and that over which parameters are sharded.
struct ParallelMeshes {
  explicit ParallelMeshes(const std::vector<int64_t>& shape)
      : all(init_device_mesh(test_device_type(), shape, {"replicate", "shard", "cp", "tp"})) {
    const auto flat = all[{"shard", "cp"}].flatten("shard_cp");
    parameters = shape[0] == 1 ? flat : DeviceMesh::concatenate({all["replicate"], flat});
  }
  int64_t data_ranks() const { return all.size(0) * all.size(1); }
  int64_t data_rank() const { return all.local_rank("replicate") * all.size(1) + all.local_rank("shard"); }

  DeviceMesh all, parameters;
};

/// All factorings of the world's ranks into replicas, shards, parts of sequences and parts of layers.
inline std::vector<std::vector<int64_t>> mesh_factorings() {
  std::vector<std::vector<int64_t>> all;
  const auto world = world_size();
  for (int64_t replicas = 1; replicas <= world; ++replicas) {
    for (int64_t shards = 1; replicas * shards <= world; ++shards) {
      for (int64_t parts = 1; replicas * shards * parts <= world; ++parts) {
        if (world % (replicas * shards * parts) == 0) all.push_back({replicas, shards, parts, world / replicas / shards / parts});
      }
    }
  }
  return all;
}

} // namespace tessera::testing
