#pragma once

#include <cstdint>
#include <vector>

#include <tessera/tests/fsdp/sharded_model.h>

namespace tessera::testing {

/// Every division of the ranks over two dims, with both strategies for these, and all others.
inline std::vector<Strategy> all_strategies() {
  auto all = strategies();
  for (int64_t outer = 1; outer <= world_size(); ++outer) {
    if (world_size() % outer != 0) continue;
    const auto mesh = [outer] {
      return init_device_mesh(mesh_device_type, {outer, world_size() / outer}, {"replicate", "shard"});
    };
    for (const auto strategy : {tessera::Strategy::kHybridShard, tessera::Strategy::kHierarchical}) {
      FullyShardOptions options;
      options.strategy = strategy;
      all.push_back({c10::str(row_of(strategy).name, " of ", outer, " x ", world_size() / outer), mesh, options});
    }
  }
  return all;
}

} // namespace tessera::testing
