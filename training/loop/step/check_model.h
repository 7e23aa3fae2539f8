#pragma once

// Internal: whether a module and its optimizer train as a step takes for granted.

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

namespace tessera::internal {

/// Throws where each of the data ranks would train a copy of its own, where a group's gradients are divided by another number
/// than that of the data ranks, and where a parameter trains that the optimizer does not have: its gradient would be added up
/// over the steps, and count in their norm. Local, and the same on every rank.
void check_trains_together(const torch::nn::Module& module, const torch::optim::Optimizer& optimizer, int64_t data_ranks);

} // namespace tessera::internal
