#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include <tessera/optim/sharded_optimizer.h>

namespace tessera {

struct LambOptions : torch::optim::OptimizerCloneableOptions<LambOptions> {
  LambOptions(double learning_rate = 1e-3) : lr_(learning_rate) {} // NOLINT(google-explicit-constructor): as LibTorch's
  TORCH_ARG(double, lr);
  using Betas = std::tuple<double, double>;
  TORCH_ARG(Betas, betas) = {0.9, 0.999};
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(double, min_coeff) = 0.01; ///< the trust ratio is held within these (DeepSpeed: min_coeff, max_coeff)
  TORCH_ARG(double, max_coeff) = 10;
  TORCH_ARG(bool, bias_correction) = true;

 public:
  double get_lr() const override { return lr(); }
  void set_lr(double rate) override { lr(rate); }
};

struct LambParamState : torch::optim::OptimizerCloneableParamState<LambParamState> {
  TORCH_ARG(int64_t, step) = 0;
  TORCH_ARG(at::Tensor, exp_avg);
  TORCH_ARG(at::Tensor, exp_avg_sq);
};

/// LAMB (You et al., "Large Batch Optimization for Deep Learning", 2020, algorithm 2): Adam's direction u = m̂/(√v̂ + ε) + λw,
/// times the trust ratio ‖w‖/‖u‖ of the whole parameter, which is 1 where a norm is 0. State: Adam's. The norms of all parameters
/// take one all-reduce for each mesh dim that splits them.
class Lamb : public ShardedOptimizer {
 public:
  explicit Lamb(const std::vector<torch::optim::OptimizerParamGroup>& groups, const LambOptions& defaults = {});
  explicit Lamb(std::vector<at::Tensor> parameters, const LambOptions& defaults = {});

 protected:
  void update() override;
};

} // namespace tessera
