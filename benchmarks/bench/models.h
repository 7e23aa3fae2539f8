#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "settings.h"

namespace tessera::benchmarks {

/// A model to measure, on data that is the same in each step and another on each rank.
struct BenchModel {
  std::shared_ptr<torch::nn::Module> module;
  std::vector<std::shared_ptr<torch::nn::Module>> blocks; ///< of which each is to be a group
  std::function<torch::Tensor()> loss;                    ///< a forward
  int64_t items = 0;                                      ///< tokens, or rows, that this rank takes in a step
};

/// Its weights are the same on all ranks.
BenchModel make_model(const Settings& settings, int rank);

} // namespace tessera::benchmarks
