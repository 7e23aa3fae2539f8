#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include <tessera/optim/sharded_optimizer.h>

namespace tessera {

struct AdamW8bitOptions : torch::optim::OptimizerCloneableOptions<AdamW8bitOptions> {
  AdamW8bitOptions(double learning_rate = 1e-3) : lr_(learning_rate) {} // NOLINT(google-explicit-constructor): as LibTorch's
  TORCH_ARG(double, lr);
  using Betas = std::tuple<double, double>;
  TORCH_ARG(Betas, betas) = {0.9, 0.999};
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = 1e-2;
  TORCH_ARG(int64_t, min_8bit_size) = 4096; ///< parameters with fewer elements keep moments in their own dtype

 public:
  double get_lr() const override { return lr(); }
  void set_lr(double rate) override { lr(rate); }
};

struct AdamW8bitParamState : torch::optim::OptimizerCloneableParamState<AdamW8bitParamState> {
  TORCH_ARG(int64_t, step) = 0;
  TORCH_ARG(at::Tensor, exp_avg);           ///< uint8 codes of a signed table; of a small parameter its dtype
  TORCH_ARG(at::Tensor, exp_avg_sq);        ///< uint8 codes of an unsigned table; the same
  TORCH_ARG(at::Tensor, exp_avg_absmax);    ///< [blocks], float, on every rank: what the codes of a block are relative to
  TORCH_ARG(at::Tensor, exp_avg_sq_absmax); ///< the same
};

/// AdamW with moments in 8 bits (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022; bitsandbytes): blocks of
/// 256 elements of the flattened parameter, each relative to its largest element, in bitsandbytes' dynamic tables. A step brings
/// a moment to float, updates it, and rounds it to the nearest code, never to one of the other sign. State: 2 bytes an element
/// and 8 for each block of 256, the latter on every rank.
///
/// Blocks count from the parameter's first element, so that they are the same on any number of ranks and in any layout: a state
/// is loaded bit by bit elsewhere. Ranks may hold parts of one block; each step takes one all-reduce (the maximum of 8 bytes a
/// block) for each mesh dim that splits parameters.
class AdamW8bit : public ShardedOptimizer {
 public:
  explicit AdamW8bit(const std::vector<torch::optim::OptimizerParamGroup>& groups, const AdamW8bitOptions& defaults = {});
  explicit AdamW8bit(std::vector<at::Tensor> parameters, const AdamW8bitOptions& defaults = {});

 protected:
  void update() override;
};

} // namespace tessera
