#pragma once

#include <torch/nn/module.h>

#include <tessera/mesh/device_mesh.h>

namespace tessera {

/// Gives the buffers of `module` and below the same values on all ranks of `mesh`: for floating-point and complex buffers the
/// mean, which is summed in double; for integers and booleans the values of the mesh's first rank. Use it before an evaluation or
/// a save, for the running statistics of BatchNorms that each rank computed from its own rows.
///
/// Every rank of the mesh (of any number of dims) calls it, with the same buffers. Otherwise every rank throws, and the error
/// names the first buffer that differs. Buffers are written in place. DTensors and undefined buffers are ignored. A buffer on the
/// meta device is an error.
void average_buffers(torch::nn::Module& module, const DeviceMesh& mesh);

/// Gives the buffers of `module` and below the values that they have on the mesh's first rank, as DDP does before a forward
/// (`broadcast_buffers`). Which ranks call it, which buffers are ignored, and errors: as above.
void broadcast_buffers(torch::nn::Module& module, const DeviceMesh& mesh);

} // namespace tessera
