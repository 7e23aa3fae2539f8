#pragma once

#include <torch/nn/module.h>

#include <tessera/mesh/device_mesh.h>

namespace tessera {

/// Gives the buffers of `module` and below the same values on all ranks of `mesh`: of floating-point and complex ones the mean,
/// which is summed in double; of integers and booleans those of the mesh's first rank. For the running statistics of a BatchNorm
/// that each rank took of its own rows, before an evaluation or a save.
///
/// Every rank of the mesh (of any number of dims) calls it, with the same buffers; otherwise every rank throws, and the error
/// names the first that differs. Buffers are written in place. DTensors and undefined buffers are passed over. One on the meta
/// device is an error.
void average_buffers(torch::nn::Module& module, const DeviceMesh& mesh);

/// Gives the buffers of `module` and below the values that they have on the mesh's first rank, as DDP does before a forward
/// (`broadcast_buffers`). Ranks that call it, errors, and what is passed over, as above.
void broadcast_buffers(torch::nn::Module& module, const DeviceMesh& mesh);

} // namespace tessera
