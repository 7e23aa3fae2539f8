#pragma once

#include <tessera/parallel/moe.h>
#include <torch/torch.h>

namespace gpt {

/// The byte values: the model reads and predicts bytes.
inline constexpr int64_t kVocabulary = 256;

struct ModelConfig {
  int64_t layers = 4;
  int64_t width = 128; ///< features of a token; a multiple of `heads`
  int64_t heads = 4;
  int64_t sequence = 128; ///< the longest context, in bytes
  int64_t experts = 0;    ///< of a block, in the place of its MLP; 0: none
  int64_t top_k = 2;      ///< experts of a token
  double balance = 0.01;  ///< coefficient of the loss that balances them
};

/// Causal self-attention over x [batch, time, width].
class AttentionImpl : public torch::nn::Module {
 public:
  explicit AttentionImpl(const ModelConfig& config);
  torch::Tensor forward(const torch::Tensor& x);

 private:
  int64_t heads_;
  torch::nn::Linear qkv_{nullptr}, projection_{nullptr};
};
TORCH_MODULE(Attention);

/// A pre-norm block: x + attention(norm(x)), then x + mlp(norm(x)), where the MLP may be a mixture of experts. Those that a token
/// chooses have as many features together as the MLP.
class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const ModelConfig& config);
  torch::Tensor forward(torch::Tensor x);

 private:
  torch::nn::LayerNorm attention_norm_{nullptr}, mlp_norm_{nullptr};
  Attention attention_{nullptr};
  torch::nn::Linear expand_{nullptr}, contract_{nullptr};
  tessera::MoE moe_{nullptr}; ///< in their place
};
TORCH_MODULE(Block);

/// A GPT over bytes whose head is tied to the token embedding. It knows nothing of sharding.
class GptImpl : public torch::nn::Module {
 public:
  explicit GptImpl(const ModelConfig& config);

  /// Logits [batch, time, kVocabulary] of the byte after each of tokens [batch, time] (int64, time ≤ sequence). `positions`
  /// [time] of the tokens: 0, 1, … by default.
  torch::Tensor forward(const torch::Tensor& tokens, const torch::Tensor& positions = {});
  /// What comes before the blocks, and what comes after them.
  torch::Tensor embed(const torch::Tensor& tokens, const torch::Tensor& positions = {});
  torch::Tensor logits(const torch::Tensor& x) { return torch::linear(norm_->forward(x), token_embedding_->weight); }

  /// Whether backward computes the blocks once more, and only their inputs are kept for it.
  void set_recompute(bool recompute) { recompute_ = recompute; }

  const ModelConfig& config() const { return config_; }
  const torch::nn::ModuleList& blocks() const { return blocks_; }

 private:
  void initialize();

  ModelConfig config_;
  bool recompute_ = false;
  torch::nn::Embedding token_embedding_{nullptr}, position_embedding_{nullptr};
  torch::nn::ModuleList blocks_;
  torch::nn::LayerNorm norm_{nullptr};
};
TORCH_MODULE(Gpt);

/// The mean cross entropy, in nats a byte, of `logits` [batch, time, kVocabulary] for `targets` [batch, time]; computed in fp32.
torch::Tensor cross_entropy(const torch::Tensor& logits, const torch::Tensor& targets);

} // namespace gpt
