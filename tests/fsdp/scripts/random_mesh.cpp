#include "random_mesh.h"

#include <tessera/collectives/process_context.h>

#include <vector>

#include <tessera/tests/support/test_device.h>

namespace tessera::testing::scripts {
namespace {

DeviceMesh draw_mesh(Draw& draw, int64_t world) {
  std::vector<std::vector<int64_t>> shapes{{world}, {1, world}, {world, 1}};
  if (world == 4) shapes.insert(shapes.end(), 2, {2, 2});
  const auto shape = draw.of(shapes);
  if (shape.size() == 1) return init_device_mesh(test_device_type(), shape, {"shard"});
  return init_device_mesh(test_device_type(), shape, {"replicate", "shard"});
}

std::optional<Strategy> draw_strategy(Draw& draw, const DeviceMesh& mesh) {
  if (draw.chance(60)) return std::nullopt;
  if (mesh.ndim() == 2) return Strategy::kHierarchical;
  return draw.of(std::vector<Strategy>{Strategy::kZero1, Strategy::kZero2});
}

} // namespace

RandomMesh::RandomMesh(Draw& draw)
    : replicates(draw.chance(12)),
      mesh(replicates ? init_device_mesh(test_device_type(), {process_context().world_size()})
                      : draw_mesh(draw, process_context().world_size())),
      strategy(replicates ? std::nullopt : draw_strategy(draw, mesh)) {}

std::string RandomMesh::description() const {
  const auto where = replicates ? "replicate" : c10::str("mesh ", mesh.shape());
  return strategy ? c10::str(where, ", ", row_of(*strategy).name) : where;
}

} // namespace tessera::testing::scripts
