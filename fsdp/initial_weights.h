#pragma once

// Internal: do all ranks shard the same model?

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include <tessera/fsdp/options.h>
#include <tessera/mesh/device_mesh.h>

namespace tessera::fsdp_internal {

/// Compares names, shapes and dtypes of `tensors` over all ranks of `mesh`, and, as `mode` says, their values; or overwrites them
/// with rank 0's. Every rank of the mesh calls it. On a difference every rank throws, naming the parameter and the ranks.
void agree_on_initial_weights(const std::vector<at::Tensor>& tensors, const std::vector<std::string>& names,
                              const DeviceMesh& mesh, InitialWeights mode, const std::string& module);

} // namespace tessera::fsdp_internal
