#pragma once

#include <torch/torch.h>

#include <cstdint>

#include <tessera/activations/recompute.h>

namespace tessera::testing {

/// A block with causal attention and grouped queries, that knows nothing of ranks. Keys have no bias: a softmax does not change
/// with it, and Adam would divide the rounding of its gradient by itself.
struct GptBlockImpl : torch::nn::Module {
  GptBlockImpl(int64_t width, int64_t heads, int64_t key_heads)
      : heads_(heads),
        key_heads_(key_heads),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        mlp_norm(register_module("mlp_norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        query(register_module("query", torch::nn::Linear(width, width))),
        key_value(register_module("key_value",
                                  torch::nn::Linear(torch::nn::LinearOptions(width, 2 * width / heads * key_heads).bias(false)))),
        projection(register_module("projection", torch::nn::Linear(width, width))),
        up(register_module("up", torch::nn::Linear(width, 3 * width))),
        down(register_module("down", torch::nn::Linear(torch::nn::LinearOptions(3 * width, width).bias(false)))) {}

  torch::Tensor forward(const torch::Tensor& x) {
    const auto y = x + projection(attention(norm(x)));
    return y + down(torch::gelu(up(mlp_norm(y))));
  }

 private:
  torch::Tensor attention(const torch::Tensor& x) {
    const auto batch = x.size(0), time = x.size(1), width = x.size(2), features = width / heads_;
    const auto q = query(x).view({batch, time, heads_, features}).transpose(1, 2);
    const auto parts = key_value(x).view({batch, time, 2, key_heads_, features}).permute({2, 0, 3, 1, 4}).unbind(0);
    const auto mixed = at::scaled_dot_product_attention(q, parts[0], parts[1], {}, 0.0, /*is_causal=*/true, std::nullopt,
                                                        /*enable_gqa=*/true);
    return mixed.transpose(1, 2).reshape({batch, time, width});
  }
  int64_t heads_, key_heads_;

 public:
  torch::nn::LayerNorm norm, mlp_norm;
  torch::nn::Linear query, key_value, projection, up, down;
};
TORCH_MODULE(GptBlock);

struct SmallGptOptions {
  int64_t vocabulary = 29, width = 24, heads = 8, key_heads = 4, depth = 2, sequence = 32;
};

/// Its head is tied to the embedding.
struct SmallGptImpl : torch::nn::Module {
  explicit SmallGptImpl(const SmallGptOptions& options = {})
      : embed(register_module("embed", torch::nn::Embedding(options.vocabulary, options.width))),
        places(register_module("places", torch::nn::Embedding(options.sequence, options.width))),
        blocks(register_module("blocks", torch::nn::ModuleList())),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.width})))) {
    for (int64_t i = 0; i < options.depth; ++i) blocks->push_back(GptBlock(options.width, options.heads, options.key_heads));
  }
  /// Logits [batch, time, vocabulary] of tokens [batch, time] at positions [time].
  torch::Tensor forward(const torch::Tensor& tokens, const torch::Tensor& positions) {
    auto x = embed(tokens) + places(positions);
    for (auto& each : *blocks) {
      auto& block = *each->as<GptBlock>();
      x = recomputes ? tessera::recompute(block, x) : block.forward(x);
    }
    return torch::linear(norm(x), embed->weight);
  }
  bool recomputes = false;
  torch::nn::Embedding embed, places;
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm;
};
TORCH_MODULE(SmallGpt);

} // namespace tessera::testing
