#pragma once

#include <tessera/collectives/process_context.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/meta_init.h>

#include <numeric>
#include <string>
#include <vector>

namespace tessera::testing {

/// A small model with odd sizes, a 0-dim parameter, a tied parameter, a frozen one and a buffer.
struct TrainedModel : torch::nn::Module {
  explicit TrainedModel(uint64_t seed) : TrainedModel() {
    at::manual_seed(seed);
    const torch::NoGradGuard no_grad;
    for (auto& parameter : parameters()) parameter.uniform_(-0.5, 0.5);
  }
  TrainedModel()
      : embed(register_module("embed", torch::nn::Embedding(11, 7))),
        blocks(register_module("blocks", torch::nn::ModuleList())),
        scale(register_parameter("scale", torch::ones({}))),
        frozen(register_parameter("frozen", torch::ones({3, 7}), false)),
        shift(register_buffer("shift", torch::full({7}, 0.25))) {
    for (int i = 0; i < 2; ++i) {
      blocks->push_back(torch::nn::Sequential(torch::nn::LayerNorm(torch::nn::LayerNormOptions({7})), torch::nn::Linear(7, 13),
                                              torch::nn::Tanh(), torch::nn::Linear(13, 7)));
    }
    register_parameter("head", embed->weight);
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    auto x = embed(tokens) * scale + frozen.select(0, 1) + shift;
    for (auto& block : *blocks) x = x + block->as<torch::nn::Sequential>()->forward(x);
    return torch::nn::functional::linear(x, embed->weight);
  }
  torch::nn::Embedding embed;
  torch::nn::ModuleList blocks;
  torch::Tensor scale, frozen, shift;
};

/// The strategies that a job of `world_size` ranks can run.
inline std::vector<std::string> strategies(int world_size) {
  std::vector<std::string> all{"full-ragged", "full-per-parameter", "no-shard", "plain"};
  if (world_size == 4) all.insert(all.end(), {"hybrid-ragged", "hybrid-per-parameter"});
  return all;
}

inline void shard(TrainedModel& model, const std::string& strategy) {
  if (strategy == "plain") return; // every rank trains on the whole batch
  const int64_t n = process_context().world_size();
  const auto mesh = strategy.starts_with("hybrid") ? init_device_mesh(at::kCPU, {2, n / 2}, {"replicate", "shard"})
                                                   : init_device_mesh(at::kCPU, {n});
  if (strategy == "no-shard") {
    replicate(model, mesh);
    return;
  }
  FullyShardOptions options;
  options.layout = strategy.ends_with("ragged") ? BufferLayout::kRagged : BufferLayout::kPerParameter;
  for (auto& block : *model.blocks) fully_shard(*block, mesh, options);
  fully_shard(model, mesh, options);
}

/// One step on a batch that depends on `step` alone, of which each rank takes its part (all of it under "plain"); the mean loss.
inline double train_step(TrainedModel& model, torch::optim::Optimizer& optimizer, const std::string& strategy, int64_t step) {
  auto& context = process_context();
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(1000 + step));
  auto tokens = torch::randint(0, 11, {12, 6}, generator, at::kLong);
  if (strategy != "plain") tokens = tokens.chunk(context.world_size())[context.rank()];
  optimizer.zero_grad();
  const auto logits = model.forward(tokens.slice(1, 0, 5));
  const auto loss = torch::nn::functional::cross_entropy(logits.reshape({-1, 11}), tokens.slice(1, 1, 6).reshape({-1}));
  loss.backward();
  optimizer.step();
  std::vector<int64_t> world(static_cast<size_t>(context.world_size()));
  std::iota(world.begin(), world.end(), 0);
  const auto mean = loss.detach().clone();
  context.communicator(world, at::kCPU)->all_reduce(mean, ReduceOp::kAvg, "loss").wait();
  return mean.item<double>();
}

} // namespace tessera::testing
