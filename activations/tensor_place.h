#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>

namespace tessera {

/// A place where tensors are stored between forward and backward. It takes a tensor and returns a function that brings the tensor
/// back, with the same values, shape, dtype and device. That function may be called several times, and is destroyed with the
/// graph.
using TensorPlace = std::function<std::function<at::Tensor()>(const at::Tensor& tensor)>;

/// In the memory of the host: the tensor is copied there, and back to its device when backward needs it. `pinned`: page-locked,
/// so that the copies overlap with the device's computation. Tensors on the CPU stay where they are.
TensorPlace host_memory(bool pinned = false);

/// Stores tensors in an unnamed file in `folder`, which the system removes when no tensor in it is used any more. It is written
/// when a tensor is saved, and read when backward needs the tensor. Tensors of less than 64 KiB, and those with gaps between
/// their elements, stay in memory. Errors of the folder and the disk name the folder, here or in the forward that saves.
TensorPlace file_memory(const std::string& folder);

} // namespace tessera
