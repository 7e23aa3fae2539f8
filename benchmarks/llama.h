#pragma once

#include <torch/torch.h>

#include <cstdint>

namespace tessera::benchmarks {

/// The shapes of Llama 3 70B.
struct LlamaShape {
  int64_t layers = 80, width = 8192, hidden = 28672, heads = 64, key_heads = 8, vocabulary = 128256;
};

/// A decoder of that shape: RMS norms, grouped attention, a gated feed-forward part. Without the rotation of positions, which
/// takes no part in what is sharded and sent.
class LlamaImpl : public torch::nn::Module {
 public:
  explicit LlamaImpl(const LlamaShape& shape);
  /// [batch, length] tokens to [batch, length, vocabulary].
  torch::Tensor forward(const torch::Tensor& tokens);

  torch::nn::ModuleList blocks;

 private:
  torch::nn::Embedding embedding_{nullptr};
  torch::nn::Linear head_{nullptr};
  torch::Tensor scale_;
};
TORCH_MODULE(Llama);

} // namespace tessera::benchmarks
