#pragma once

#include <c10/core/Scalar.h>
#include <c10/core/TensorOptions.h>

#include <vector>

#include <tessera/dtensor/api.h>

namespace tessera {

/// New DTensors of global shape `sizes` on a mesh. Every rank calls them with the same arguments; nothing is communicated, and a
/// rank allocates only its own part. `options` has the dtype (default: torch's) and requires_grad; the device is the mesh's. With
/// Partial(sum) and Partial(norm) the first rank holds the values and the others zeros.
DTensor empty(const std::vector<int64_t>& sizes, const DeviceMesh& mesh, const Placements& placements,
              const at::TensorOptions& options = {});
DTensor full(const std::vector<int64_t>& sizes, const at::Scalar& value, const DeviceMesh& mesh, const Placements& placements,
             const at::TensorOptions& options = {});
DTensor zeros(const std::vector<int64_t>& sizes, const DeviceMesh& mesh, const Placements& placements,
              const at::TensorOptions& options = {});
DTensor ones(const std::vector<int64_t>& sizes, const DeviceMesh& mesh, const Placements& placements,
             const at::TensorOptions& options = {});
/// The values that one device draws from the same generator state (torch::manual_seed), for every placement.
DTensor rand(const std::vector<int64_t>& sizes, const DeviceMesh& mesh, const Placements& placements,
             const at::TensorOptions& options = {});
DTensor randn(const std::vector<int64_t>& sizes, const DeviceMesh& mesh, const Placements& placements,
              const at::TensorOptions& options = {});

} // namespace tessera
