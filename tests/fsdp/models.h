#pragma once

#include <tessera/dtensor/api.h>
#include <torch/torch.h>

#include <vector>

namespace tessera::testing {

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width)
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        up(register_module("up", torch::nn::Linear(width, 3 * width))),
        down(register_module("down", torch::nn::Linear(torch::nn::LinearOptions(3 * width, width).bias(false)))) {}
  torch::Tensor forward(const torch::Tensor& x) { return x + down(torch::gelu(up(norm(x)))); }
  torch::nn::LayerNorm norm;
  torch::nn::Linear up, down;
};
TORCH_MODULE(Block);

/// Embedding, residual blocks, and a head tied to the embedding. The odd width makes shards uneven.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(int64_t vocabulary = 61, int64_t width = 18, int64_t depth = 3)
      : embed(register_module("embed", torch::nn::Embedding(vocabulary, width))),
        blocks(register_module("blocks", torch::nn::ModuleList())),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))) {
    for (int64_t i = 0; i < depth; ++i) blocks->push_back(Block(width));
  }
  /// Of tokens on any device. An offloaded weight computes on that of its mesh.
  torch::Tensor embedded(const torch::Tensor& tokens) {
    const auto& weight = embed->weight;
    return embed(tokens.to(is_dtensor(weight) ? DTensor(weight).spec().mesh().device() : weight.device()));
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    auto x = embedded(tokens);
    for (auto& block : *blocks) x = block->as<Block>()->forward(x);
    return torch::matmul(norm(x), embed->weight.t());
  }
  torch::nn::Embedding embed;
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm;
};
TORCH_MODULE(Net);

inline Net make_net(uint64_t seed = 0) {
  torch::manual_seed(seed);
  return Net();
}

/// The same 12 sequences on every rank; 12 divides by 1–4.
inline torch::Tensor global_batch(int64_t step, int64_t vocabulary = 61) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(1000 + step));
  return torch::randint(0, vocabulary, {12, 9}, generator, torch::kLong);
}

inline torch::Tensor part_of(const torch::Tensor& batch, int64_t rank, int64_t ranks) {
  return batch.chunk(ranks)[static_cast<size_t>(rank)];
}

inline torch::Tensor loss_of(Net& net, const torch::Tensor& tokens) {
  const auto logits = net->forward(tokens.slice(1, 0, -1));
  return torch::nn::functional::cross_entropy(logits.reshape({-1, logits.size(-1)}),
                                              tokens.slice(1, 1).reshape({-1}).to(logits.device()));
}

} // namespace tessera::testing
