#pragma once

#include <torch/optim/optimizer.h>

#include <tuple>
#include <vector>

#include <tessera/optim/sharded_optimizer.h>

namespace tessera {

struct LionOptions : torch::optim::OptimizerCloneableOptions<LionOptions> {
  LionOptions(double learning_rate = 1e-4) : lr_(learning_rate) {} // NOLINT(google-explicit-constructor): as LibTorch's
  TORCH_ARG(double, lr);
  using Betas = std::tuple<double, double>;
  TORCH_ARG(Betas, betas) = {0.9, 0.99};
  TORCH_ARG(double, weight_decay) = 0; ///< decoupled, as AdamW's

 public:
  double get_lr() const override { return lr(); }
  void set_lr(double rate) override { lr(rate); }
};

struct LionParamState : torch::optim::OptimizerCloneableParamState<LionParamState> {
  TORCH_ARG(at::Tensor, exp_avg);
};

/// Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2): w -= lr·(sign(β₁m + (1 - β₁)g) + λw),
/// then m = β₂m + (1 - β₂)g. State: one tensor of the parameter's size, half of Adam's. Everything is elementwise: no rank
/// communicates. Its learning rate is about a third to a tenth of AdamW's, and its weight decay as many times larger.
class Lion : public ShardedOptimizer {
 public:
  explicit Lion(const std::vector<torch::optim::OptimizerParamGroup>& groups, const LionOptions& defaults = {});
  explicit Lion(std::vector<at::Tensor> parameters, const LionOptions& defaults = {});

 protected:
  void update() override;
};

} // namespace tessera
