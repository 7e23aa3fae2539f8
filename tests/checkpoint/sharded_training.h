#pragma once

#include <tessera/checkpoint/state_dict.h>
#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/api.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/meta_init.h>
#include <torch/torch.h>

#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "../support/matchers.h"
#include "../support/test_device.h"

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

/// All strategies with each layout; every job can run them.
inline std::vector<std::string> strategies_and_layouts() {
  return {"full-ragged",          "full-per-parameter", "hybrid-ragged",
          "hybrid-per-parameter", "no-shard-ragged",    "no-shard-per-parameter"};
}

/// Sweeps over pairs of strategies always take it.
inline bool are_default(const std::string& from, const std::string& to) { return from == "full-ragged" && to == "full-ragged"; }

/// Each of `blocks` is a group, and the rest of `model` one.
inline void shard(torch::nn::Module& model, const std::vector<std::shared_ptr<torch::nn::Module>>& blocks,
                  const std::string& strategy) {
  if (strategy == "plain") return; // every rank trains on the whole batch
  const int64_t n = process_context().world_size();
  const int64_t replicas = n % 2 == 0 ? 2 : 1;
  const auto mesh = strategy.starts_with("hybrid")
                        ? init_device_mesh(test_device_type(), {replicas, n / replicas}, {"replicate", "shard"})
                        : init_device_mesh(test_device_type(), {n});
  FullyShardOptions options;
  options.layout = strategy.ends_with("per-parameter") ? BufferLayout::kPerParameter : BufferLayout::kRagged;
  if (strategy.starts_with("no-shard")) {
    replicate(model, mesh, options);
    return;
  }
  for (const auto& block : blocks) fully_shard(*block, mesh, options);
  fully_shard(model, mesh, options);
}
inline void shard(TrainedModel& model, const std::string& strategy) { shard(model, model.blocks->children(), strategy); }

inline double mean_loss_over_ranks(const at::Tensor& loss) {
  auto& context = process_context();
  std::vector<int64_t> world(static_cast<size_t>(context.world_size()));
  std::iota(world.begin(), world.end(), 0);
  const auto mean = loss.detach().cpu().clone();
  context.communicator(world, at::kCPU)->all_reduce(mean, ReduceOp::kAvg, "loss").wait();
  return mean.item<double>();
}

/// This rank's rows of a batch (all of them under "plain").
inline at::Tensor rows_of(const at::Tensor& batch, const std::string& strategy) {
  return strategy == "plain" ? batch : batch.chunk(process_context().world_size())[process_context().rank()];
}

/// The loss of this rank's rows of a batch that depends on `step` alone, on the device of the parameters or, if these lie
/// elsewhere, on `device`.
inline at::Tensor loss_of(TrainedModel& model, const std::string& strategy, int64_t step,
                          std::optional<at::Device> device = std::nullopt) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(1000 + step));
  const auto tokens = rows_of(torch::randint(0, 11, {12, 6}, generator, at::kLong), strategy);
  const auto logits = model.forward(tokens.slice(1, 0, 5).to(device.value_or(model.scale.device())));
  return torch::nn::functional::cross_entropy(logits.reshape({-1, 11}), tokens.slice(1, 1, 6).reshape({-1}).to(logits.device()));
}

/// One step; the mean loss.
inline double train_step(TrainedModel& model, torch::optim::Optimizer& optimizer, const std::string& strategy, int64_t step) {
  optimizer.zero_grad();
  const auto loss = loss_of(model, strategy, step);
  loss.backward();
  optimizer.step();
  return mean_loss_over_ranks(loss);
}

/// A model and its optimizer under a strategy.
struct Training {
  Training(const std::string& sharding, uint64_t seed)
      : strategy(sharding), model(seed), optimizer(parameters_of(model), torch::optim::AdamWOptions(0.05).amsgrad(true)) {
    shard(model, strategy);
  }
  // A tied parameter is registered twice and optimized once.
  static std::vector<at::Tensor> parameters_of(TrainedModel& model) {
    std::vector<at::Tensor> parameters;
    for (const auto& parameter : model.named_parameters()) {
      if (parameter.key() != "head") parameters.push_back(parameter.value());
    }
    return parameters;
  }
  double step(int64_t number) { return train_step(model, optimizer, strategy, number); }
  StateDict state() { return state_dict(model, optimizer); }

  std::string strategy;
  TrainedModel model;
  torch::optim::AdamW optimizer;
};

/// The whole tensor, plain, on the CPU; every rank of a DTensor's mesh calls it.
inline at::Tensor whole_tensor(const at::Tensor& tensor) {
  return (is_dtensor(tensor) ? DTensor(tensor.detach()).full_tensor() : tensor.detach()).cpu();
}

/// Every tensor and value of `expected`, bit for bit; every rank calls it.
inline void expect_same(const StateDict& actual, const StateDict& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (const auto& entry : expected.entries()) {
    SCOPED_TRACE(entry.name);
    if (entry.is_tensor()) {
      EXPECT_TENSORS_EQUAL(whole_tensor(actual.tensor(entry.name)), whole_tensor(expected.tensor(entry.name)));
    } else {
      EXPECT_EQ(actual.value(entry.name), expected.value(entry.name));
    }
  }
}

} // namespace tessera::testing
