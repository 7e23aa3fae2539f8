#pragma once

#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "gpt/options.h"

namespace gpt {

/// The optimizer that `options` name, with weight decay on matrices only. An error lists the names.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(const torch::nn::Module& model, const Options& options);

/// The names that `make_optimizer` takes.
std::vector<std::string> optimizer_names();

/// The learning rate of step 0, 1, …: linear warm-up, then a cosine down to a tenth at the last step.
double learning_rate(const Options& options, int64_t step);

} // namespace gpt
