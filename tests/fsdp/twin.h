#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>

#include <tessera/tests/fsdp/sharded_model.h>

namespace tessera::testing {

/// A model beside its unsharded twin, which sees every rank's part of the batch.
struct GradientTwins {
  explicit GradientTwins(const Strategy& strategy) { shard_model(sharded, strategy); }

  /// The gradients of `loss(net, tokens)`; of the twin those of the whole batch.
  void backward(int64_t step, const std::function<torch::Tensor(Net&, const torch::Tensor&)>& loss = loss_of) {
    loss(plain, global_batch(step)).backward();
    loss(sharded, own_batch(step)).backward();
  }
  /// In both models.
  void set_requires_grad(const std::string& parameter, bool required) {
    plain->named_parameters()[parameter].requires_grad_(required);
    sharded->named_parameters()[parameter].requires_grad_(required);
  }
  torch::Tensor gradient(const std::string& parameter) const { return sharded->named_parameters()[parameter].grad(); }
  void expect_equal_gradients() const {
    const auto expected = plain->named_parameters();
    for (const auto& item : sharded->named_parameters()) {
      const auto& gradient = expected[item.key()].grad();
      ASSERT_EQ(item.value().grad().defined(), gradient.defined()) << item.key();
      if (!gradient.defined()) continue;
      EXPECT_TRUE(torch::allclose(full(item.value().grad()), gradient, 1e-4, 1e-6)) << item.key();
    }
  }

  Net plain = make_net(), sharded = make_net();
};

} // namespace tessera::testing
