#pragma once

// Internal: do all ranks shard the same model?

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include <tessera/fsdp/options.h>
#include <tessera/mesh/device_mesh.h>

namespace tessera::internal {

/// The same on every rank of the mesh.
struct WeightAgreement {
  int64_t checksum = 0;     ///< of the values; 0 where they were not compared
  int64_t model_number = 0; ///< the largest of the ranks'; 0 on a mesh of one rank
};

/// Compares `options` (a text), and names, shapes and dtypes of `tensors`, over all ranks of `mesh`, and, as `mode` says, the
/// values; or overwrites them with rank 0's. Every rank of the mesh calls it. On a difference every rank throws, naming the
/// parameter and the ranks, after `call` ("fully_shard of Net").
WeightAgreement agree_on_initial_weights(const std::vector<at::Tensor>& tensors, const std::vector<std::string>& names,
                                         const DeviceMesh& mesh, InitialWeights mode, const std::string& call,
                                         const std::string& options, int64_t model_number);

} // namespace tessera::internal
