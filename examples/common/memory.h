#pragma once

#include <torch/torch.h>

#include <cstdint>

namespace examples {

/// Elements of all parameters of the model; those that another name shares count once.
int64_t parameter_count(const torch::nn::Module& model);

/// Bytes that this process keeps in memory (the resident set), LibTorch itself included.
int64_t resident_bytes();

/// Bytes of this rank's storages of parameters, gradients and optimizer state; and, for a sharded model, of the gathered
/// parameters that are allocated now.
int64_t state_bytes(const torch::nn::Module& model, const torch::optim::AdamW* optimizer = nullptr);

} // namespace examples
