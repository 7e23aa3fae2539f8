#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <optional>
#include <vector>

#include <tessera/optim/sharded_optimizer.h>

namespace tessera {

struct AdafactorOptions : torch::optim::OptimizerCloneableOptions<AdafactorOptions> {
  AdafactorOptions(double learning_rate = 1e-2) : lr_(learning_rate) {} // NOLINT(google-explicit-constructor): as LibTorch's
  TORCH_ARG(double, lr);
  TORCH_ARG(double, beta2_decay) = -0.8;       ///< β₂ = 1 - step^beta2_decay
  TORCH_ARG(std::optional<double>, eps1) = {}; ///< of the second moments; the dtype's epsilon when it is left out
  TORCH_ARG(double, eps2) = 1e-3;              ///< the least RMS of a parameter that the step is relative to
  TORCH_ARG(double, d) = 1;                    ///< the RMS to which an update is clipped
  TORCH_ARG(double, weight_decay) = 0;

 public:
  double get_lr() const override { return lr(); }
  void set_lr(double rate) override { lr(rate); }
};

struct AdafactorParamState : torch::optim::OptimizerCloneableParamState<AdafactorParamState> {
  TORCH_ARG(int64_t, step) = 0;
  TORCH_ARG(at::Tensor, row_var);  ///< [..., rows, 1], whole on every rank; of parameters with two dims and more
  TORCH_ARG(at::Tensor, col_var);  ///< [..., 1, columns], the same
  TORCH_ARG(at::Tensor, variance); ///< as the parameter, of those with one dim and none
};

/// Adafactor (Shazeer and Stern, 2018) with the semantics and options of torch.optim.Adafactor: second moments of matrices are
/// kept as means of rows and columns. State of a matrix: rows + columns, on every rank. A step takes two all-reduces for each
/// mesh dim that splits parameters, one of the sums of rows and columns and one of the updates' norms.
class Adafactor : public ShardedOptimizer {
 public:
  explicit Adafactor(const std::vector<torch::optim::OptimizerParamGroup>& groups, const AdafactorOptions& defaults = {});
  explicit Adafactor(std::vector<at::Tensor> parameters, const AdafactorOptions& defaults = {});

 protected:
  void update() override;
};

} // namespace tessera
