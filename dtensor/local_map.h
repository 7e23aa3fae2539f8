#pragma once

#include <functional>
#include <vector>

#include <tessera/dtensor/api.h>

namespace tessera {

/// A function of plain tensors on every rank's parts (DTensor: local_map). The result is called with DTensors, by every rank of
/// the mesh. Each argument is redistributed to its entry of `inputs` (DTensor: only with redistribute_inputs; inside
/// StrictSharding, one that would have to move is an error here too), and `function` gets the parts. Its results are the parts of
/// tensors with the placements of `outputs`. They are split evenly, as in from_local, unless `output_sizes` has their global
/// shapes. Differentiable if `function` is. The gradient of each part is assumed to have the placements of its input, with
/// Replicate for Partial, or else those of `input_gradients` (in_grad_placements). A Replicate input that is used with split
/// ones, such as the weight of a split batch, needs Partial there: each rank computes only its own part of the gradient.
using LocalFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;
std::function<std::vector<DTensor>(const std::vector<DTensor>&)> local_map(
    const LocalFunction& function, const std::vector<Placements>& outputs, const std::vector<Placements>& inputs,
    const std::vector<std::vector<int64_t>>& output_sizes = {}, const std::vector<Placements>& input_gradients = {});

} // namespace tessera
