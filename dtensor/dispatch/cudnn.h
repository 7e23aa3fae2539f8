#pragma once

// Internal: what composite kernels of CUDA take from cuDNN, and must not for DTensors.

#include <torch/library.h>

namespace tessera::internal::dispatch {

/// Kernels for the autograd key of a device that has cuDNN: CUDA's, and others' in tests.
void register_cudnn_choices(torch::Library& library);

} // namespace tessera::internal::dispatch
