#pragma once

// Internal: the blocks of a transformer.

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <vector>

#include <tessera/parallel/moe.h>
#include <tessera/plan/models/transformer_config.h>

namespace tessera::internal::models {

class NormImpl : public torch::nn::Module {
 public:
  NormImpl(NormKind kind, int64_t width, double epsilon);
  at::Tensor forward(const at::Tensor& x);

 private:
  NormKind kind_;
  int64_t width_;
  double epsilon_;
  at::Tensor weight_, bias_;
};
TORCH_MODULE(Norm);

at::Tensor activate(Activation activation, const at::Tensor& x);

/// What all blocks read beside their input: nothing, or cosines and sines [length, head size] of rotated positions, and then
/// maybe a mask [length, length].
using Surroundings = std::vector<at::Tensor>;

/// Attention and a feed-forward part, or a mixture of them, each added to what went in: [rows, length, width] to the same.
class BlockImpl : public torch::nn::Module {
 public:
  BlockImpl(const BlockConfig& config, const BlockNames& names);
  at::Tensor forward(const at::Tensor& x, const Surroundings& around);

 private:
  at::Tensor heads_of(const at::Tensor& x) const;
  at::Tensor attention(const at::Tensor& x, const Surroundings& around);
  at::Tensor feed_forward(const at::Tensor& x);
  at::Tensor dropped(const at::Tensor& x) const;

  BlockConfig config_;
  torch::nn::Linear query_{nullptr}, key_{nullptr}, value_{nullptr}, packed_{nullptr}, output_{nullptr};
  Norm attention_norm_{nullptr}, feed_forward_norm_{nullptr};
  torch::nn::Linear gate_{nullptr}, up_{nullptr}, down_{nullptr};
  MoE mixture_{nullptr};
};
TORCH_MODULE(Block);

} // namespace tessera::internal::models
