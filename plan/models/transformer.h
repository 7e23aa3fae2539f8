#pragma once

// Internal: a transformer of any of the kinds.

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <tessera/plan/models/block.h>
#include <tessera/plan/models/transformer_config.h>
#include <tessera/plan/planned_model.h>

namespace tessera::internal::models {

/// The parameters have the names of Hugging Face's.
class TransformerImpl : public torch::nn::Module {
 public:
  explicit TransformerImpl(TransformerConfig config);

  /// Of tokens [rows, length] or pictures [rows, channels, side, side]: what the head gives, [rows, length, vocabulary],
  /// [rows, classes] or [rows, width]; without one the last block's output. `positions` [length] of the tokens; undefined: 0, 1,
  /// …
  at::Tensor forward(const at::Tensor& input, const at::Tensor& positions = {}, const PassSettings& pass = {});

  // `forward` is made of these.
  at::Tensor embed(const at::Tensor& input, const at::Tensor& positions);
  Surroundings surroundings(const at::Tensor& positions) const;
  at::Tensor finish(const at::Tensor& x);

  const TransformerConfig& config() const { return config_; }
  Block block(int64_t i) const { return blocks_[static_cast<size_t>(i)]; }
  /// The paths of what `embed` reads, and of what `finish` reads.
  std::vector<std::string> embedding_members() const;
  std::vector<std::string> head_members() const;

 private:
  void add_embeddings();
  void add_head();
  void draw_weights();
  at::Tensor embed_pictures(const at::Tensor& pictures);

  TransformerConfig config_;
  torch::nn::Embedding tokens_{nullptr}, positions_{nullptr}, kinds_{nullptr};
  Norm embedding_norm_{nullptr}, norm_{nullptr}, head_norm_{nullptr};
  torch::nn::Conv2d patches_{nullptr};
  at::Tensor first_, picture_positions_, head_bias_;
  std::vector<Block> blocks_;
  torch::nn::Linear head_{nullptr}, head_dense_{nullptr};
};
TORCH_MODULE(Transformer);

/// `block`'s forward, recomputed in backward where the settings say so.
at::Tensor run_block(const Block& block, const at::Tensor& x, const Surroundings& around, const PassSettings& pass);

} // namespace tessera::internal::models
