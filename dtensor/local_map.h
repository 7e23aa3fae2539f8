#pragma once

#include <functional>
#include <vector>

#include <tessera/dtensor/api.h>

namespace tessera {

/// A function of plain tensors on every rank's parts (DTensor: local_map). The result is called with DTensors, by every rank of
/// the mesh: each argument is redistributed to its entry of `inputs`, `function` gets the parts, and what it returns are the
/// parts of tensors that lie as `outputs` say. Outputs split in the sense of from_local: evenly, unless `output_sizes` has their
/// global shapes. Differentiable where `function` is: the gradient of each part is taken to lie as its input does, Replicate for
/// Partial, or as `input_gradients` say (in_grad_placements). A Replicate input beside split ones, as the weight of a split
/// batch, needs Partial there: each rank has the gradient of its own part alone.
using LocalFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;
std::function<std::vector<DTensor>(const std::vector<DTensor>&)> local_map(
    const LocalFunction& function, const std::vector<Placements>& outputs, const std::vector<Placements>& inputs,
    const std::vector<std::vector<int64_t>>& output_sizes = {}, const std::vector<Placements>& input_gradients = {});

} // namespace tessera
