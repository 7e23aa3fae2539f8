#pragma once

#include <tessera/dtensor/placement.h>
#include <tessera/mesh/device_mesh.h>

#include <cstdint>
#include <vector>

#include <tessera/tests/support/test_device.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing {

struct Layout {
  DeviceMesh mesh;
  Placements placements;
};

/// How a tensor whose leading dims are these may lie: split along either, cut inside a row, replicated, and on two mesh dims.
inline std::vector<Layout> layouts(int64_t rows, int64_t columns) {
  const auto positions = rows * columns;
  const auto world = world_size();
  const auto one = init_device_mesh(test_device_type(), {world});
  const auto two = init_device_mesh(test_device_type(), {world % 2 == 0 ? 2 : 1, world % 2 == 0 ? world / 2 : world}, {"a", "b"});
  std::vector<int64_t> extents(static_cast<size_t>(world), positions / world);
  extents.back() += positions % world;
  return {{one, {Shard{0}}},
          {one, {Shard{1}}},
          {one, {Replicate{}}},
          {one, {RaggedShard{1, extents}}},
          {two, {Replicate{}, Shard{0}}},
          {two, {Shard{0}, Replicate{}}},
          {two, {Shard{0}, Shard{1}}},
          {two, {Shard{0}, Shard{0}}}};
}

} // namespace tessera::testing
