#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include <tessera/optim/sharded_optimizer.h>

namespace tessera {

// Optimizers that reduce momentum, or gradients, in one bit an element with error feedback, for parameters that every rank has
// whole (`replicate`, Strategy::kNoShard). They take gradients that nothing has reduced:
//
//   replicate(*model, mesh);
//   fsdp(*model).set_keeps_own_gradients(true);
//   OneBitAdam optimizer(model->parameters(), OneBitAdamOptions(1e-3).freeze_step(23000));
//
// (Gradients that are reduced already are taken too, and nothing is saved.) Parameters and moments are equal on all ranks, to the
// bit. The reduction: each rank adds the error that its last signs left, and sends for each element its sign (of 0: +) and for
// each parameter the mean size, ‖x‖₂/√n; each rank adds up a part of all ranks' and does the same with it. That sends 1/8 byte an
// element twice, and a number a parameter. Errors of both rounds are kept for the next one: what was sent and what is left add up
// to what came in. They are saved, and are an error of a load on another number of ranks.
//
// Every rank of the mesh takes each step. A parameter without a gradient on some ranks has zero there; one that has none on any
// rank stays. Moments of bf16 and fp16 parameters are in float. `clip_grad_norm_` of gradients that nothing has reduced reduces
// each of them. Errors: a sharded parameter, which is named; parameters on several meshes.

struct OneBitAdamOptions : torch::optim::OptimizerCloneableOptions<OneBitAdamOptions> {
  OneBitAdamOptions(double learning_rate = 1e-3) : lr_(learning_rate) {} // NOLINT(google-explicit-constructor): as LibTorch's
  TORCH_ARG(double, lr);
  using Betas = std::tuple<double, double>;
  TORCH_ARG(Betas, betas) = {0.9, 0.999};
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(int64_t, freeze_step) = 100000; ///< the last step that reduces whole gradients

 public:
  double get_lr() const override { return lr(); }
  void set_lr(double rate) override { lr(rate); }
};

struct OneBitAdamParamState : torch::optim::OptimizerCloneableParamState<OneBitAdamParamState> {
  TORCH_ARG(int64_t, step) = 0;
  TORCH_ARG(at::Tensor, exp_avg);
  TORCH_ARG(at::Tensor, exp_avg_sq);
  TORCH_ARG(at::Tensor, worker_error); ///< [ranks, elements], a row a rank; from the first step on that sends signs
  TORCH_ARG(at::Tensor, server_error); ///< [ranks, elements of a rank's part]
};

/// 1-bit Adam (Tang et al., 2021; DeepSpeed's OnebitAdam): Adam without bias correction until `freeze_step`. Then the second
/// moment stays, and the momentum, with the rank's own gradient added, is reduced in one bit. Where the second moment is 0 (rows
/// that no warm-up has used) nothing is updated any more: DeepSpeed asks for a mask of these. Weight decay is added to the
/// direction, times lr.
class OneBitAdam : public ShardedOptimizer {
 public:
  explicit OneBitAdam(const std::vector<torch::optim::OptimizerParamGroup>& groups, const OneBitAdamOptions& defaults = {});
  explicit OneBitAdam(std::vector<at::Tensor> parameters, const OneBitAdamOptions& defaults = {});

 protected:
  void update() override;
};

struct OneBitLambOptions : torch::optim::OptimizerCloneableOptions<OneBitLambOptions> {
  OneBitLambOptions(double learning_rate = 1e-3) : lr_(learning_rate) {} // NOLINT(google-explicit-constructor): as LibTorch's
  TORCH_ARG(double, lr);
  using Betas = std::tuple<double, double>;
  TORCH_ARG(Betas, betas) = {0.9, 0.999};
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(int64_t, freeze_step) = 100000;
  TORCH_ARG(double, max_coeff) = 10; ///< of the trust ratio
  TORCH_ARG(double, min_coeff) = 0.01;
  TORCH_ARG(double, coeff_beta) = 0.9; ///< of the running mean of the trust ratios
  TORCH_ARG(double, factor_max) = 4;   ///< of what the ratio is multiplied by afterwards
  TORCH_ARG(double, factor_min) = 0.5;
  TORCH_ARG(double, factor_threshold) = 0.1; ///< how much of itself that may change by in a step

 public:
  double get_lr() const override { return lr(); }
  void set_lr(double rate) override { lr(rate); }
};

struct OneBitLambParamState : torch::optim::OptimizerCloneableParamState<OneBitLambParamState> {
  TORCH_ARG(int64_t, step) = 0;
  TORCH_ARG(at::Tensor, exp_avg);
  TORCH_ARG(at::Tensor, exp_avg_sq);
  TORCH_ARG(at::Tensor, exp_avg_sq_fresh); ///< that goes on after `freeze_step`
  TORCH_ARG(at::Tensor, worker_error);
  TORCH_ARG(at::Tensor, server_error);
  TORCH_ARG(double, frozen_coeff) = 0; ///< the running mean of the trust ratios
  TORCH_ARG(double, last_factor) = 1;
};

/// 1-bit LAMB (Li et al., 2021; DeepSpeed's OnebitLamb): LAMB without bias correction until `freeze_step`, with a running mean of
/// the trust ratios. Then the momentum is reduced in one bit; the second moment of the direction and the mean ratio stay. The
/// ratio is multiplied by the largest √v/√v′ of the parameter, within bounds, where v′ goes on with the gradient that the change
/// of the momentum tells of. Each parameter has sizes of its own, so that DeepSpeed's scales between parameters are not needed.
class OneBitLamb : public ShardedOptimizer {
 public:
  explicit OneBitLamb(const std::vector<torch::optim::OptimizerParamGroup>& groups, const OneBitLambOptions& defaults = {});
  explicit OneBitLamb(std::vector<at::Tensor> parameters, const OneBitLambOptions& defaults = {});

 protected:
  void update() override;
};

struct ZeroOneAdamOptions : torch::optim::OptimizerCloneableOptions<ZeroOneAdamOptions> {
  ZeroOneAdamOptions(double learning_rate = 1e-3) : lr_(learning_rate) {} // NOLINT(google-explicit-constructor): as LibTorch's
  TORCH_ARG(double, lr);
  using Betas = std::tuple<double, double>;
  TORCH_ARG(Betas, betas) = {0.9, 0.999};
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(int64_t, var_freeze_step) = 100000;  ///< the last step before the second moment stays
  TORCH_ARG(int64_t, var_update_scaler) = 16;    ///< updates of the second moment after which their distance doubles
  TORCH_ARG(int64_t, local_step_scaler) = 32678; ///< local steps after which the distance of reductions doubles
  TORCH_ARG(int64_t, local_step_clipper) = 16;   ///< the largest distance of reductions, in steps

 public:
  double get_lr() const override { return lr(); }
  void set_lr(double rate) override { lr(rate); }
};

struct ZeroOneAdamParamState : torch::optim::OptimizerCloneableParamState<ZeroOneAdamParamState> {
  TORCH_ARG(int64_t, step) = 0;
  TORCH_ARG(at::Tensor, exp_avg);
  TORCH_ARG(at::Tensor, exp_avg_sq);
  TORCH_ARG(at::Tensor, worker_error);
  TORCH_ARG(at::Tensor, server_error);
  TORCH_ARG(at::Tensor, anchor); ///< the parameter after the last reduction, once the ranks step apart; not saved
  TORCH_ARG(double, lr_sum) = 0; ///< of the steps since then
  TORCH_ARG(int64_t, var_interval) = 1;
  TORCH_ARG(int64_t, var_counter) = 0;
  TORCH_ARG(int64_t, local_interval) = 1;
  TORCH_ARG(int64_t, local_counter) = 0;
  TORCH_ARG(bool, is_frozen) = false;
};

/// 0/1 Adam (Lu et al., 2022; DeepSpeed's ZeroOneAdam): until `var_freeze_step` the second moment is updated, with whole
/// gradients, every `var_interval` steps, which grows; the steps between reduce the gradient in one bit. Then the second moment
/// stays, and the ranks step apart; every `local_interval` steps, which grows, they take their steps back, reduce in one bit what
/// these have moved, times √v + ε, step by the mean, and take it, over the sum of learning rates, as their momentum.
///
/// Between such reductions the parameters differ between ranks, and a state dict is an error: save where `is_synchronized`, or
/// call `synchronize` before.
class ZeroOneAdam : public ShardedOptimizer {
 public:
  explicit ZeroOneAdam(const std::vector<torch::optim::OptimizerParamGroup>& groups, const ZeroOneAdamOptions& defaults = {});
  explicit ZeroOneAdam(std::vector<at::Tensor> parameters, const ZeroOneAdamOptions& defaults = {});
  /// Whether the parameters are equal on all ranks now.
  bool is_synchronized() const;
  /// Brings together now those that are not, by the reduction that would come later. Every rank calls it. The steps go on as if
  /// that had come at its time: the distance of reductions does not change.
  void synchronize();

 protected:
  void update() override;
};

} // namespace tessera
