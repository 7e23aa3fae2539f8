#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <string>

#include <tessera/dtensor/api.h>

namespace tessera {

/// Says how a parameter or buffer, called by its full name ("layers.0.weight"), lies on the mesh.
using PlaceParameter = std::function<Placements(const std::string& name, const at::Tensor& tensor)>;

/// Turns all parameters and buffers of `module` into DTensors, in place (DTensor: distribute_module): the values of the mesh's
/// first rank, laid out as `place` says, by default replicated. Handles that were taken before stay valid; gradients are dropped.
/// Every rank of the mesh calls it. Parameters that are DTensors already are left as they are. The module is then called with
/// DTensors.
void distribute_module(torch::nn::Module& module, const DeviceMesh& mesh, const PlaceParameter& place = {});

} // namespace tessera
