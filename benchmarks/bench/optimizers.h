#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tessera::benchmarks {

/// The names that `make_optimizer` takes.
std::vector<std::string> optimizer_names();

/// The optimizer of that name, with a learning rate of 1e-4 and a weight decay of 0.01. `steps` are those that it will do. Throws
/// c10::Error for another name.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name, const torch::nn::Module& model, int64_t steps);

/// Tensors of a parameter's shape and dtype that it keeps, nearly.
int64_t optimizer_tensors(const std::string& name);

/// Whether it takes gradients that nothing has reduced.
bool reduces_by_itself(const std::string& name);

} // namespace tessera::benchmarks
