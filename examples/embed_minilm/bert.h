#pragma once

#include <torch/torch.h>

#include <string>

#include "finetune/lora.h"

namespace minilm {

/// The sizes of a BERT encoder, by the names of Hugging Face's config.json.
struct BertConfig {
  int64_t vocab_size = 0, max_position_embeddings = 0, type_vocab_size = 0;
  int64_t hidden_size = 0, intermediate_size = 0;
  int64_t num_hidden_layers = 0, num_attention_heads = 0;
  double layer_norm_eps = 1e-12;
};

/// Reads config.json. An error that names the file and the field for one that is missing, out of range, or asks for another
/// architecture than BERT's with GELU and absolute positions.
BertConfig read_config(const std::string& path);

/// The sum of a token's, its position's and its segment's embedding, normalized.
class EmbeddingsImpl : public torch::nn::Module {
 public:
  explicit EmbeddingsImpl(const BertConfig& config);
  torch::Tensor forward(const torch::Tensor& tokens);

 private:
  torch::nn::Embedding word_embeddings_{nullptr}, position_embeddings_{nullptr}, token_type_embeddings_{nullptr};
  torch::nn::LayerNorm norm_{nullptr};
};
TORCH_MODULE(Embeddings);

/// Attention of every token to those of its sentence.
class SelfAttentionImpl : public torch::nn::Module {
 public:
  explicit SelfAttentionImpl(const BertConfig& config);
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& mask);

 private:
  int64_t heads_;
  lora::Linear query_{nullptr}, key_{nullptr}, value_{nullptr};
};
TORCH_MODULE(SelfAttention);

/// norm(residual + dense(x)).
class ResidualImpl : public torch::nn::Module {
 public:
  ResidualImpl(int64_t inputs, const BertConfig& config);
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& residual);

 private:
  lora::Linear dense_{nullptr};
  torch::nn::LayerNorm norm_{nullptr};
};
TORCH_MODULE(Residual);

/// A post-norm block: attention, then a perceptron of one hidden layer.
class LayerImpl : public torch::nn::Module {
 public:
  explicit LayerImpl(const BertConfig& config);
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& mask);

 private:
  SelfAttention self_{nullptr};
  Residual attention_output_{nullptr}, output_{nullptr};
  lora::Linear dense_{nullptr};
};
TORCH_MODULE(Layer);

/// The BERT encoder without its pooler and without dropout, its parameters under Hugging Face's names. It knows nothing of
/// sharding, and its linear layers can be adapted.
class BertImpl : public torch::nn::Module {
 public:
  explicit BertImpl(const BertConfig& config);

  /// Features [sentences, time, hidden_size] of tokens [sentences, time] (int64, time ≤ max_position_embeddings). `mask`
  /// [sentences, time] (bool) is true for tokens and false for padding; every sentence has at least one token.
  torch::Tensor forward(const torch::Tensor& tokens, const torch::Tensor& mask);

  /// Whether the layers' activations are computed again in backward, instead of being kept.
  void recompute_layers(bool recompute) { recompute_ = recompute; }

  const BertConfig& config() const { return config_; }
  const torch::nn::ModuleList& layers() const { return layers_; }

 private:
  BertConfig config_;
  Embeddings embeddings_{nullptr};
  torch::nn::ModuleList layers_{nullptr};
  bool recompute_ = false;
};
TORCH_MODULE(Bert);

} // namespace minilm
