#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <string>

#include <tessera/dtensor/api.h>

namespace tessera {

/// Returns the placements of a parameter or buffer, which is given with its full name ("layers.0.weight").
using PlaceParameter = std::function<Placements(const std::string& name, const at::Tensor& tensor)>;

/// Turns all parameters and buffers of `module` into DTensors, in place (DTensor: distribute_module), with the values of the
/// mesh's first rank and the placements of `place`, by default replicated. Earlier handles stay valid; gradients are dropped.
/// Every rank of the mesh calls it. Parameters that are DTensors already are left as they are. The module is then called with
/// DTensors.
void distribute_module(torch::nn::Module& module, const DeviceMesh& mesh, const PlaceParameter& place = {});

} // namespace tessera
