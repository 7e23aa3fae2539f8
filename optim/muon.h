#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include <tessera/optim/sharded_optimizer.h>

namespace tessera {

/// How Muon's learning rate follows a matrix's shape (torch.optim.Muon: adjust_lr_fn).
enum class MuonAdjustLr {
  kOriginal,      ///< lr·√max(1, rows / columns): Jordan's
  kMatchRmsAdamW, ///< lr·0.2·√max(rows, columns): Moonlight's, with which AdamW's learning rate and weight decay fit
};

struct MuonOptions : torch::optim::OptimizerCloneableOptions<MuonOptions> {
  MuonOptions(double learning_rate = 1e-3) : lr_(learning_rate) {} // NOLINT(google-explicit-constructor): as LibTorch's
  TORCH_ARG(double, lr);
  TORCH_ARG(double, weight_decay) = 0.1; ///< decoupled: lr·weight_decay, whatever the shape
  TORCH_ARG(double, momentum) = 0.95;
  TORCH_ARG(bool, nesterov) = true;
  using Coefficients = std::tuple<double, double, double>;
  TORCH_ARG(Coefficients, ns_coefficients) = {3.4445, -4.775, 2.0315}; ///< of the Newton-Schulz iteration
  TORCH_ARG(int64_t, ns_steps) = 5;
  TORCH_ARG(double, eps) = 1e-7; ///< the least norm that a matrix is divided by
  TORCH_ARG(MuonAdjustLr, adjust_lr) = MuonAdjustLr::kOriginal;
  /// False for a group that AdamW steps, with `lr`, `weight_decay` and the two below.
  TORCH_ARG(bool, use_muon) = true;
  using Betas = std::tuple<double, double>;
  TORCH_ARG(Betas, adamw_betas) = {0.9, 0.95};
  TORCH_ARG(double, adamw_eps) = 1e-8;

 public:
  double get_lr() const override { return lr(); }
  void set_lr(double rate) override { lr(rate); }
};

struct MuonParamState : torch::optim::OptimizerCloneableParamState<MuonParamState> {
  TORCH_ARG(at::Tensor, momentum_buffer); ///< of a parameter that Muon steps
  TORCH_ARG(int64_t, step) = 0;           ///< of one that AdamW steps, as the two below
  TORCH_ARG(at::Tensor, exp_avg);
  TORCH_ARG(at::Tensor, exp_avg_sq);
};

/// Muon (Jordan et al., 2024; Liu et al., "Muon is scalable for LLM training", 2025) with the semantics of torch.optim.Muon: the
/// momentum of a matrix, made orthogonal by Newton-Schulz steps in bf16. A parameter of more dims counts as a matrix of its first
/// dim by the rest, as Jordan's does with convolutions. State: one tensor of the parameter's size.
///
/// A matrix that ranks hold in parts is gathered by one of them, which computes alone: two all-to-alls a step of 2 bytes an
/// element, the work spread evenly. Numbers equal those of one process bit by bit, whatever the layout. Embeddings, output heads,
/// vectors and scalars belong to groups with `use_muon(false)`, which AdamW steps in the same object; `muon_groups` makes these
/// groups.
///
/// Errors: a parameter with fewer than two dims in a group of Muon's, named by its shape.
class Muon : public ShardedOptimizer {
 public:
  explicit Muon(const std::vector<torch::optim::OptimizerParamGroup>& groups, const MuonOptions& defaults = {});
  explicit Muon(std::vector<at::Tensor> parameters, const MuonOptions& defaults = {});

 protected:
  void update() override;
};

/// The groups of a model's parameters for Muon: first the matrices of hidden layers, with `muon`, then all others, with `adamw`,
/// whose `use_muon` becomes false. Others are parameters of fewer than two dims, those of torch::nn::Embedding and EmbeddingBag,
/// and those whose names contain one of `others` (for example {"lm_head"}). A tied parameter counts once. A group may be empty,
/// and is then left out. An error for a name of `others` that no parameter's name contains.
std::vector<torch::optim::OptimizerParamGroup> muon_groups(const torch::nn::Module& module, const MuonOptions& muon,
                                                           const MuonOptions& adamw, const std::vector<std::string>& others = {});

} // namespace tessera
