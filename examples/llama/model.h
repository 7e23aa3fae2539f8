#pragma once

#include <tessera/parallel/styles.h>
#include <torch/torch.h>

#include <cstdint>

namespace llama {

/// As in a configuration of Hugging Face's LlamaForCausalLM.
struct Config {
  int64_t vocab_size = 256; ///< the byte values
  int64_t hidden_size = 64, intermediate_size = 176;
  int64_t num_hidden_layers = 2;
  int64_t num_attention_heads = 8, num_key_value_heads = 2;
  double rope_theta = 10000, rms_norm_eps = 1e-6;

  int64_t head_size() const { return hidden_size / num_attention_heads; }
};

/// x / sqrt(mean(x²) + eps) · weight over the last dim (arXiv 1910.07467).
class RmsNormImpl : public torch::nn::Module {
 public:
  RmsNormImpl(int64_t size, double eps);
  torch::Tensor forward(const torch::Tensor& x);

 private:
  double eps_;
  torch::Tensor weight_;
};
TORCH_MODULE(RmsNorm);

/// Cosines and sines [time, head size] of rotary positions (arXiv 2104.09864), their halves alike as Hugging Face has them.
struct Rotation {
  torch::Tensor cosines, sines;
};
Rotation rotation_at(const torch::Tensor& positions, const Config& config);

/// Causal attention over x [batch, time, hidden], with grouped queries.
class AttentionImpl : public torch::nn::Module {
 public:
  explicit AttentionImpl(const Config& config);
  torch::Tensor forward(const torch::Tensor& x, const Rotation& rotation);

 private:
  int64_t head_size_;
  torch::nn::Linear q_proj_{nullptr}, k_proj_{nullptr}, v_proj_{nullptr}, o_proj_{nullptr};
};
TORCH_MODULE(Attention);

/// down(silu(gate(x)) · up(x)) (arXiv 2002.05202).
class MlpImpl : public torch::nn::Module {
 public:
  explicit MlpImpl(const Config& config);
  torch::Tensor forward(const torch::Tensor& x);

 private:
  torch::nn::Linear gate_proj_{nullptr}, up_proj_{nullptr}, down_proj_{nullptr};
};
TORCH_MODULE(Mlp);

class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const Config& config);
  torch::Tensor forward(const torch::Tensor& x, const Rotation& rotation);

 private:
  RmsNorm input_layernorm_{nullptr}, post_attention_layernorm_{nullptr};
  Attention self_attn_{nullptr};
  Mlp mlp_{nullptr};
};
TORCH_MODULE(Block);

/// A decoder whose parameters have the names of LlamaForCausalLM ("model.layers.0.self_attn.q_proj.weight", …). It knows nothing
/// of ranks.
class LlamaImpl : public torch::nn::Module {
 public:
  explicit LlamaImpl(const Config& config);

  /// Logits [batch, time, vocab_size] of what follows tokens [batch, time]. `positions` [time]: 0, 1, … by default.
  torch::Tensor forward(const torch::Tensor& tokens, const torch::Tensor& positions = {});

  const Config& config() const { return config_; }
  const torch::nn::ModuleList& blocks() const { return blocks_; }

 private:
  Config config_;
  torch::nn::Embedding embed_tokens_{nullptr};
  torch::nn::ModuleList blocks_;
  RmsNorm norm_{nullptr};
  torch::nn::Linear lm_head_{nullptr};
};
TORCH_MODULE(Llama);

/// Megatron's plan for `ranks`. Key heads that the ranks do not divide stay whole: each rank uses those of its query heads. An
/// error that names the numbers of ranks that fit, where the heads do not divide. With `sequence_parallel` the activations
/// between the layers are split over their time.
tessera::ParallelPlan parallel_plan(const Config& config, int64_t ranks, bool sequence_parallel);

} // namespace llama
