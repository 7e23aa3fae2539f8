#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>

namespace tessera {

/// Where tensors lie between forward and backward. It takes a tensor, and returns the function that brings it back, with the same
/// values, shape, dtype and device, as often as it is called. What that function holds is freed with the graph.
using TensorPlace = std::function<std::function<at::Tensor()>(const at::Tensor& tensor)>;

/// In the memory of the host: a copy there, and back to the tensor's device when backward asks for it. `pinned`: page-locked, so
/// that the copies overlap with what the device computes. Tensors on the CPU are there already.
TensorPlace host_memory(bool pinned = false);

/// In a file of `folder` without a name, which the system removes when nothing in it is used any more. Written when a tensor is
/// saved, read when backward asks for it. Tensors of less than 64 KiB, and those with gaps between their elements, stay in
/// memory. Errors of the folder and the disk name them, here or in the forward that saves.
TensorPlace file_memory(const std::string& folder);

} // namespace tessera
