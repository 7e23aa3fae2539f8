#pragma once

#include <functional>
#include <vector>

#include <tessera/dtensor/api.h>

namespace tessera {

/// A function of plain tensors on every rank's parts (DTensor: local_map). The result is called with DTensors, by every rank of
/// the mesh: each argument is redistributed to its entry of `inputs`, `function` gets the parts, and what it returns are the
/// parts of tensors that lie as `outputs` say. Differentiable where `function` is. Outputs split in the sense of from_local:
/// evenly, unless `output_sizes` has their global shapes.
using LocalFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;
std::function<std::vector<DTensor>(const std::vector<DTensor>&)> local_map(
    const LocalFunction& function, const std::vector<Placements>& outputs, const std::vector<Placements>& inputs,
    const std::vector<std::vector<int64_t>>& output_sizes = {});

} // namespace tessera
