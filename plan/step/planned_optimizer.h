#pragma once

// Internal: the optimizer of a plan's settings.

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <string>

namespace tessera::internal {

/// One of `plan_optimizers`, as a trainer's config makes it, for what trains of `module`.
std::unique_ptr<torch::optim::Optimizer> make_planned_optimizer(const std::string& name, const torch::nn::Module& module);

} // namespace tessera::internal
