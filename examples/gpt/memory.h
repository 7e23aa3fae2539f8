#pragma once

#include <torch/torch.h>

#include <cstdint>

namespace gpt {

/// Bytes that this process keeps in memory (the resident set), LibTorch itself included.
int64_t resident_bytes();

/// Bytes of this rank's storages of parameters, gradients and optimizer state; and, for a sharded model, of the gathered
/// parameters that are allocated now.
int64_t state_bytes(const torch::nn::Module& model, const torch::optim::AdamW& optimizer);

} // namespace gpt
