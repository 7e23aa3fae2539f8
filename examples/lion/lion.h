#pragma once

// An optimizer that neither LibTorch nor Tessera knows: Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms",
// 2023). It is written as LibTorch's own are. Everything on a parameter and its gradient is elementwise, so each rank computes on
// its shard, without communication.

#include <tessera/tessera.h>
#include <torch/torch.h>

#include <memory>
#include <tuple>
#include <utility>
#include <vector>

namespace lion {

struct LionOptions : torch::optim::OptimizerCloneableOptions<LionOptions> {
  LionOptions(double learning_rate = 1e-4) : lr_(learning_rate) {} // NOLINT(google-explicit-constructor): as LibTorch's
  TORCH_ARG(double, lr);
  TORCH_ARG(double, weight_decay) = 0;
  using Betas = std::tuple<double, double>;
  TORCH_ARG(Betas, betas) = {0.9, 0.99};

 public:
  double get_lr() const override { return lr(); } // for LibTorch's schedulers
  void set_lr(double rate) override { lr(rate); }
};

struct LionParamState : torch::optim::OptimizerCloneableParamState<LionParamState> {
  TORCH_ARG(torch::Tensor, exp_avg);
};

class Lion : public torch::optim::Optimizer {
 public:
  explicit Lion(std::vector<torch::Tensor> parameters, const LionOptions& defaults = {})
      : Optimizer(std::move(parameters), std::make_unique<LionOptions>(defaults)) {}

  torch::Tensor step(LossClosure closure = nullptr) override {
    torch::Tensor loss;
    if (closure) {
      const torch::AutoGradMode grad_mode(true);
      loss = closure();
    }
    const torch::NoGradGuard no_grad;
    for (auto& group : param_groups()) {
      for (auto& parameter : group.params()) {
        if (parameter.grad().defined()) update(parameter, static_cast<const LionOptions&>(group.options()));
      }
    }
    return loss;
  }

 private:
  void update(torch::Tensor& parameter, const LionOptions& options) {
    auto& kept = state()[parameter.unsafeGetTensorImpl()];
    if (!kept) {
      auto fresh = std::make_unique<LionParamState>();
      fresh->exp_avg(torch::zeros_like(parameter));
      kept = std::move(fresh);
    }
    auto& exp_avg = static_cast<LionParamState&>(*kept).exp_avg();
    const auto& gradient = parameter.grad();
    const auto [beta1, beta2] = options.betas();
    parameter.mul_(1 - options.lr() * options.weight_decay());
    parameter.add_(exp_avg.mul(beta1).add_(gradient, 1 - beta1).sign_(), -options.lr());
    exp_avg.mul_(beta2).add_(gradient, 1 - beta2);
  }
};

/// What a state dict holds of a Lion. Once in every process.
inline void register_lion() {
  tessera::register_optimizer<Lion, LionParamState, LionOptions>(
      "Lion", {{"exp_avg", &LionParamState::exp_avg}},
      {{"lr", &LionOptions::lr}, {"weight_decay", &LionOptions::weight_decay}, {"betas", &LionOptions::betas}});
}

} // namespace lion
