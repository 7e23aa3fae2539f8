#pragma once

#include <tessera/fsdp/strategy.h>
#include <tessera/mesh/device_mesh.h>

#include <optional>

#include <tessera/tests/support/draw.h>

namespace tessera::testing::scripts {

/// Over which ranks a group lies, and which of them keep what.
struct RandomMesh {
  /// Of all ranks: flat or 2-D, with dims of 1 as well. Every rank calls it.
  explicit RandomMesh(Draw& draw);
  std::string description() const;
  /// Its parameters stay gathered from one step of the optimizer to the next.
  bool keeps_parameters() const { return strategy == Strategy::kZero1 || strategy == Strategy::kZero2; }

  bool replicates; ///< by `replicate`, or by `fully_shard`
  DeviceMesh mesh;
  std::optional<Strategy> strategy;
};

} // namespace tessera::testing::scripts
