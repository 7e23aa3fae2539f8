#pragma once

#include <torch/torch.h>

#include <cstdint>

namespace examples {

/// Elements of all parameters of the model; those that another name shares count once.
int64_t parameter_count(const torch::nn::Module& model);

/// Bytes that this process keeps in memory (the resident set), LibTorch itself included.
int64_t resident_bytes();

/// Bytes of this rank's storages of parameters, gradients and optimizer state; and, for a sharded model, of the gathered
/// parameters that are allocated now. Every rank calls it, with an optimizer over parameters of the model.
int64_t state_bytes(const torch::nn::Module& model, torch::optim::Optimizer* optimizer = nullptr);

} // namespace examples
