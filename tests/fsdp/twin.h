#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <tessera/fsdp/clip_grad.h>

#include <tessera/tests/fsdp/sharded_model.h>

namespace tessera::testing {

using LossOf = std::function<torch::Tensor(Net&, const torch::Tensor& tokens)>;

/// What ranks add in another order is rounded otherwise.
constexpr double kSumTolerance = 1e-5;

inline void expect_equal_gradients(const Net& sharded, const Net& plain) {
  const auto expected = plain->named_parameters();
  for (const auto& item : sharded->named_parameters()) {
    const auto& gradient = expected[item.key()].grad();
    ASSERT_EQ(item.value().grad().defined(), gradient.defined()) << item.key();
    if (!gradient.defined()) continue;
    const auto got = full(item.value().grad());
    EXPECT_TRUE(torch::allclose(got, gradient.to(got.scalar_type()), 1e-4, 1e-6)) << item.key();
  }
}

inline void expect_equal_losses(const std::vector<double>& got, const std::vector<double>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], kSumTolerance) << "step " << i;
}

/// Steps of AdamW with clipping, on this rank's part of each batch where the model is sharded.
struct Steps {
  int64_t count = 5;
  std::function<torch::Tensor(int64_t step)> batch = [](int64_t step) { return global_batch(step); };
  LossOf loss = loss_of;
  std::function<void(Net&)> clip = [](Net& net) { clip_grad_norm_(*net, 0.5); };
  std::function<void(Net&, int64_t step)> before = [](Net&, int64_t) {};
};

/// The losses of the whole batches.
inline std::vector<double> train(Net& net, torch::optim::Optimizer& optimizer, const Steps& steps = {}) {
  const bool shards = is_sharded(*net);
  std::vector<double> losses;
  for (int64_t step = 0; step < steps.count; ++step) {
    steps.before(net, step);
    optimizer.zero_grad();
    const auto batch = steps.batch(step);
    const auto loss = steps.loss(net, shards ? part_of(batch, world_rank(), world_size()) : batch);
    loss.backward();
    steps.clip(net);
    optimizer.step();
    losses.push_back((shards ? mean_over_ranks(loss) : loss.detach()).item<double>());
  }
  return losses;
}

inline std::vector<double> train(Net& net, const Steps& steps = {}) {
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));
  return train(net, optimizer, steps);
}

/// A sharded model beside its unsharded twin, which sees every rank's part of the batch.
struct Twin {
  Twin() = default;
  explicit Twin(const Strategy& strategy) { shard_model(sharded, strategy); }

  /// The gradients of `loss(net, tokens)`, times `factor`; of the unsharded one those of the whole batch.
  void backward(int64_t step, const LossOf& loss = loss_of, double factor = 1) {
    backward_of_plain(step, loss, factor);
    (loss(sharded, own_batch(step)) * factor).backward();
  }
  void backward_of_plain(int64_t step, const LossOf& loss = loss_of, double factor = 1) {
    (loss(plain, global_batch(step)) * factor).backward();
  }
  /// In both models.
  void set_requires_grad(const std::string& parameter, bool required) {
    plain->named_parameters()[parameter].requires_grad_(required);
    sharded->named_parameters()[parameter].requires_grad_(required);
  }
  torch::Tensor gradient(const std::string& parameter) const { return sharded->named_parameters()[parameter].grad(); }
  void expect_equal_gradients() const { testing::expect_equal_gradients(sharded, plain); }

  Net plain = make_net(), sharded = make_net();
};

} // namespace tessera::testing
