#pragma once

// Experts of which each column of a mesh has one.

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

#include <tessera/mesh/device_mesh.h>

#include <tessera/tests/support/test_device.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing {

/// The columns have an expert each.
inline DeviceMesh expert_grid() {
  const int64_t experts = world_size() % 2 == 0 ? 2 : 1;
  return init_device_mesh(test_device_type(), {world_size() / experts, experts}, {"shard", "expert"});
}

inline std::string expert_name(int64_t expert) { return "expert" + std::to_string(expert); }

/// Linear layers of 6 features: one expert has the same weights wherever it is.
inline void register_experts(torch::nn::Module& module, const std::vector<int64_t>& held, int64_t outputs) {
  for (const int64_t expert : held) {
    torch::manual_seed(static_cast<uint64_t>(10 + expert));
    module.register_module(expert_name(expert), torch::nn::Linear(6, outputs));
  }
}

} // namespace tessera::testing
