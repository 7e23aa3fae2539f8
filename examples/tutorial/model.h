#pragma once

// The model and the data of the tutorial: plain LibTorch, and the same in every step.

#include <torch/torch.h>

#include <string>
#include <utility>
#include <vector>

namespace tutorial {

constexpr int64_t kFeatures = 8, kWidth = 64, kBlocks = 4, kBatch = 64, kSteps = 50;

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    up = register_module("up", torch::nn::Linear(kWidth, 4 * kWidth));
    down = register_module("down", torch::nn::Linear(4 * kWidth, kWidth));
  }
  torch::Tensor forward(const torch::Tensor& x) { return x + down(torch::relu(up(x))); }
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

struct ModelImpl : torch::nn::Module {
  ModelImpl() {
    embed = register_module("embed", torch::nn::Linear(kFeatures, kWidth));
    for (int64_t i = 0; i < kBlocks; ++i) blocks.push_back(register_module("block" + std::to_string(i), Block()));
    head = register_module("head", torch::nn::Linear(kWidth, 1));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = embed(x);
    for (auto& block : blocks) x = block(x);
    return head(x);
  }
  torch::nn::Linear embed{nullptr}, head{nullptr};
  std::vector<Block> blocks;
};
TORCH_MODULE(Model);

/// The batch of one step: the same rows in every process that asks for it.
inline std::pair<torch::Tensor, torch::Tensor> batch(int64_t step) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(1000 + static_cast<uint64_t>(step));
  const auto x = torch::randn({kBatch, kFeatures}, generator);
  return {x, x.sin().sum(1, /*keepdim=*/true)};
}

} // namespace tutorial
