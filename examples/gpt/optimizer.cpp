#include "gpt/optimizer.h"

#include <cmath>
#include <numbers>

namespace gpt {

torch::optim::AdamW make_optimizer(const torch::nn::Module& model, const Options& options) {
  std::vector<torch::Tensor> matrices, vectors;
  for (const auto& parameter : model.parameters()) (parameter.dim() > 1 ? matrices : vectors).push_back(parameter);
  const auto settings = torch::optim::AdamWOptions(options.learning_rate).betas({0.9, 0.95});
  const auto group = [&](std::vector<torch::Tensor> parameters, double weight_decay) {
    auto own = std::make_unique<torch::optim::AdamWOptions>(settings);
    own->weight_decay(weight_decay);
    return torch::optim::OptimizerParamGroup(std::move(parameters), std::move(own));
  };
  return torch::optim::AdamW({group(matrices, options.weight_decay), group(vectors, 0.0)}, settings);
}

double learning_rate(const Options& options, int64_t step) {
  if (step < options.warmup) return options.learning_rate * static_cast<double>(step + 1) / static_cast<double>(options.warmup);
  const auto decay_steps = std::max<int64_t>(options.steps - options.warmup, 1);
  const auto progress = std::min(1.0, static_cast<double>(step - options.warmup + 1) / static_cast<double>(decay_steps));
  return options.learning_rate * (0.1 + 0.45 * (1.0 + std::cos(std::numbers::pi * progress)));
}

void set_learning_rate(torch::optim::Optimizer& optimizer, double learning_rate) {
  for (auto& group : optimizer.param_groups()) group.options().set_lr(learning_rate);
}

} // namespace gpt
