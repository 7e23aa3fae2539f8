#pragma once

#include <ATen/core/stack.h>

#include <cstdint>
#include <string>

namespace tessera::testing::sim {

/// How often CUDA would launch for a call of an operator on lists, by PyTorch's sources (`MultiTensorApply.cuh`,
/// `TensorShape.cu`); 1 for any other operator. The limit of 320 blocks a launch, which large tensors meet, is left out.
int64_t cuda_launches(const std::string& name, const torch::jit::Stack& arguments);

} // namespace tessera::testing::sim
