#pragma once

// Internal: parameters that a program forgot to shard.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <string>
#include <vector>

namespace tessera::internal {

/// The parameters of `module` without those that `fully_shard` was told to ignore.
std::vector<at::Tensor> parameters_not_ignored(const torch::nn::Module& module);

/// The names of the parameters of `module` that train and that nothing sharded or replicated, beside others that are; without
/// those that `fully_shard` was told to ignore.
std::vector<std::string> parameters_trained_apart(const torch::nn::Module& module);

/// An error that names them: each rank would train its own copy of them. `what` begins it, and `accept` says how to go on with
/// them ("accept them with …").
void check_none_trains_apart(const torch::nn::Module& module, const std::string& what, const std::string& accept);

} // namespace tessera::internal
