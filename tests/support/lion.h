#pragma once

#include <tessera/optim/register_optimizer.h>
#include <torch/torch.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace tessera::testing {

/// The Lion of Chen et al. 2023, as a program of its own would write it. Its members are data, those of LibTorch's are accessors.
struct LionOptions : torch::optim::OptimizerCloneableOptions<LionOptions> {
  LionOptions(double learning_rate = 1e-4) : lr(learning_rate) {} // NOLINT(google-explicit-constructor): as LibTorch's
  double get_lr() const override { return lr; }
  void set_lr(double rate) override { lr = rate; }

  double lr;
  std::pair<double, double> betas{0.9, 0.99};
  std::optional<double> weight_decay;
  /// The sign of a direction d is d / (|d| + softness): above 0, rounding of small gradients does not become steps of full size.
  double softness = 0;
};

struct LionState : torch::optim::OptimizerCloneableParamState<LionState> {
  torch::Tensor exp_avg;
};

class Lion : public torch::optim::Optimizer {
 public:
  explicit Lion(const std::vector<torch::optim::OptimizerParamGroup>& groups, const LionOptions& defaults = {})
      : Optimizer(groups, std::make_unique<LionOptions>(defaults)) {}
  explicit Lion(std::vector<torch::Tensor> parameters, const LionOptions& defaults = {})
      : Lion(std::vector{torch::optim::OptimizerParamGroup(std::move(parameters))}, defaults) {}

  torch::Tensor step(LossClosure closure = nullptr) override {
    torch::Tensor loss;
    if (closure) {
      const torch::AutoGradMode grad_mode(true);
      loss = closure();
    }
    const torch::NoGradGuard no_grad;
    ++steps;
    for (auto& group : param_groups()) {
      for (auto& parameter : group.params()) {
        if (parameter.grad().defined()) update(parameter, static_cast<const LionOptions&>(group.options()));
      }
    }
    return loss;
  }

  int64_t steps = 0;

 private:
  void update(torch::Tensor& parameter, const LionOptions& options) {
    auto& kept = state()[parameter.unsafeGetTensorImpl()];
    if (!kept) kept = std::make_unique<LionState>();
    auto& exp_avg = static_cast<LionState&>(*kept).exp_avg;
    const auto& gradient = parameter.grad();
    if (!exp_avg.defined()) exp_avg = torch::zeros_like(gradient);
    const auto [beta1, beta2] = options.betas;
    const auto direction = exp_avg.mul(beta1).add_(gradient, 1 - beta1);
    if (options.weight_decay) parameter.mul_(1 - options.lr * *options.weight_decay);
    if (options.softness > 0) {
      parameter.addcdiv_(direction, direction.abs().add_(options.softness), -options.lr);
    } else {
      parameter.add_(direction.sign(), -options.lr);
    }
    exp_avg.mul_(beta2).add_(gradient, 1 - beta2);
  }
};

/// The first call registers it.
inline void register_lion() {
  static const bool once = [] {
    register_optimizer<Lion, LionState, LionOptions>("Lion", {{"exp_avg", &LionState::exp_avg}},
                                                     {{"lr", &LionOptions::lr},
                                                      {"betas", &LionOptions::betas},
                                                      {"weight_decay", &LionOptions::weight_decay},
                                                      {"softness", &LionOptions::softness}},
                                                     {{"steps", &Lion::steps}});
    return true;
  }();
  (void)once;
}

} // namespace tessera::testing
