#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/benchmarks/bench.h>
#include <tessera/mesh/device_mesh.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <filesystem>
#include <vector>

#include "settings.h"

namespace tessera::benchmarks {

/// Whether the weights of a new model have memory.
enum class Weights { kReal, kOnMeta };

/// The model of a case. Throws c10::Error where the recipe gives none, no loss, or a block that is not below the model.
BenchModel make_model(const BenchRecipe& recipe, const Settings& settings, Weights weights);

/// The rows of a rank in a step. Throws c10::Error where the batch maker gives other rows than the settings ask for.
std::vector<at::Tensor> make_batch(const BenchRecipe& recipe, const Settings& settings, const BenchPlace& place);

/// A forward. Throws c10::Error for a loss that is no number, or that needs no gradient.
at::Tensor loss_of(const BenchModel& model, const Settings& settings, const std::vector<at::Tensor>& batch);

/// Makes each block a group, and of the rest another.
void shard_model(const BenchModel& model, const Settings& settings, const DeviceMesh& mesh, const std::filesystem::path& folder);

/// Gives a sharded model of the meta device memory, and the recipe's weights or drawn ones.
void give_weights(torch::nn::Module& module, const BenchRecipe& recipe);

/// Elements of all parameters; those that another name shares count once.
int64_t parameter_count(const torch::nn::Module& module);

/// Bytes of this rank's storages of parameters, gradients and optimizer state, and of gathered parameters that are there now.
int64_t state_bytes(const torch::nn::Module& module, torch::optim::Optimizer& optimizer);

} // namespace tessera::benchmarks
