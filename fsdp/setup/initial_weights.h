#pragma once

// Internal: do all ranks shard the same model?

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include <tessera/fsdp/options.h>
#include <tessera/mesh/device_mesh.h>

namespace tessera::internal {

/// What the ranks have agreed on, the same on every rank of the mesh.
struct WeightAgreement {
  int64_t checksum = 0;     ///< of the values; 0 where they were not compared
  int64_t model_number = 0; ///< the largest of the ranks'; 0 on a mesh of one rank
};

/// What a rank passes to `agree_on_initial_weights`, to be compared with the other ranks.
struct InitialWeightsCheck {
  std::vector<at::Tensor> tensors;
  std::vector<std::string> names;                          ///< of these
  std::vector<std::pair<std::string, at::Tensor>> buffers; ///< by name; for kBroadcast
  DeviceMesh mesh;
  InitialWeights mode = InitialWeights::kCheck;
  std::string call;         ///< for errors: "fully_shard of Net"
  std::string options;      ///< as text
  int64_t model_number = 0; ///< this rank's
};

/// Compares the options, and names, shapes and dtypes of the tensors, over all ranks of the mesh, and, as the mode says, the
/// values; or overwrites them, and the buffers, with rank 0's. Every rank of the mesh calls it. On a difference every rank
/// throws, naming the parameter and the ranks, after the call.
WeightAgreement agree_on_initial_weights(const InitialWeightsCheck& check);

} // namespace tessera::internal
