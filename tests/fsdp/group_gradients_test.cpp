// Gradient accumulation across backwards that differ: parameters frozen in between, blocks left out, hooks that keep gradients.
#include <tessera/fsdp/fully_shard.h>

#include <gtest/gtest.h>

#include <functional>

#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing {
namespace {

/// A model beside its unsharded twin, which sees every rank's part of the batch.
struct Pair {
  explicit Pair(const Strategy& strategy) { shard_model(sharded, strategy); }

  /// The gradients of `loss(net, tokens)`; of the twin those of the whole batch.
  void backward(int64_t step, const std::function<torch::Tensor(Net&, const torch::Tensor&)>& loss = loss_of) {
    loss(plain, global_batch(step)).backward();
    loss(sharded, part_of(global_batch(step), world_rank(), world_size())).backward();
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

/// The loss without the blocks, whose groups get no gradient.
torch::Tensor loss_without_blocks(Net& net, const torch::Tensor& tokens) { return net->norm(net->embed(tokens)).square().mean(); }

using Delay = std::pair<std::string, std::function<void(FSDPModule&, bool)>>;

/// The ways to leave reductions unfinished until a backward that is the last.
std::vector<Delay> delays() {
  return {{", in flight", [](FSDPModule& root, bool last) { root.set_is_last_backward(last); }},
          {", before the all-reduce", [](FSDPModule& root, bool last) { root.set_requires_all_reduce(last); }}};
}

TEST(GroupGradients, FreezingAmidAReductionKeepsItsGradient) {
  for (const auto& strategy : strategies()) {
    for (const auto& [name, set_last] : delays()) {
      SCOPED_TRACE(strategy.name + name);
      Pair models(strategy);
      auto root = fsdp(*models.sharded);
      set_last(root, false);
      models.backward(0);
      models.set_requires_grad("blocks.1.up.weight", false);
      set_last(root, true);
      models.backward(1);
      models.expect_equal_gradients();
    }
  }
}

TEST(GroupGradients, UnfreezingAmidAnAccumulationIsAnErrorOrRight) {
  for (const auto& strategy : strategies()) {
    for (const auto& [name, set_last] : delays()) {
      SCOPED_TRACE(strategy.name + name);
      Pair models(strategy);
      models.set_requires_grad("blocks.1.norm.weight", false);
      auto root = fsdp(*models.sharded);
      set_last(root, false);
      models.backward(0);
      models.set_requires_grad("blocks.1.norm.weight", true);
      models.set_requires_grad("blocks.1.norm.bias", false); // of the same size
      set_last(root, true);
      const auto message = error_of([&] { models.backward(1); });
      if (message == "no error") {
        models.expect_equal_gradients();
      } else {
        EXPECT_NE(message.find("blocks.1.norm.weight began to require a gradient while"), std::string::npos) << message;
      }
      models.sharded->zero_grad();
      models.plain->zero_grad();
      models.backward(2);
      models.expect_equal_gradients();
    }
  }
}

TEST(GroupGradients, AGroupThatTheLastBackwardLeavesOutIsReducedNevertheless) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Pair models(strategy);
    auto root = fsdp(*models.sharded);
    root.set_requires_all_reduce(false);
    models.backward(0);
    models.backward(1, loss_without_blocks);
    root.set_requires_all_reduce(true);
    models.backward(2, loss_without_blocks);
    models.expect_equal_gradients();
    models.backward(3);
    models.expect_equal_gradients();
  }
}

/// The loss of the first block, after a forward of the second as well, whose gradients never come.
torch::Tensor loss_of_a_part(Net& net, const torch::Tensor& tokens) {
  const auto x = net->embed(tokens);
  const auto first = (*net->blocks)[0]->as<Block>()->forward(x);
  (*net->blocks)[1]->as<Block>()->forward(first);
  return first.square().mean();
}

torch::Tensor loss_of_the_last_block(Net& net, const torch::Tensor& tokens) {
  const auto x = torch::ones({tokens.size(0), net->norm->weight.size(0)}) * tokens.slice(1, 0, 1);
  return (*net->blocks)[2]->as<Block>()->forward(x).square().mean();
}

TEST(GroupGradients, AGroupReducedAtTheEndOfABackwardGetsItsAllReduceLater) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Pair models(strategy);
    auto root = fsdp(*models.sharded);
    root.set_requires_all_reduce(false);
    models.backward(0, loss_of_a_part);
    root.set_requires_all_reduce(true);
    models.backward(1, loss_of_the_last_block);
    models.expect_equal_gradients();
  }
}

TEST(GroupGradients, TogglesWhileAReductionIsInFlightLoseNothing) {
  for (const auto& strategy : strategies()) {
    for (const bool last_at_once : {true, false}) {
      SCOPED_TRACE(strategy.name);
      Pair models(strategy);
      auto root = fsdp(*models.sharded);
      root.set_is_last_backward(false);
      models.backward(0, loss_of_a_part);
      root.set_requires_all_reduce(false);
      root.set_is_last_backward(last_at_once);
      models.backward(1, loss_of_the_last_block);
      models.backward(2, loss_of_a_part);
      root.set_requires_all_reduce(true);
      root.set_is_last_backward(true);
      models.backward(3, loss_of_the_last_block);
      models.expect_equal_gradients();
    }
  }
}

TEST(GroupGradients, AFailedBackwardDropsWhatWaitedForAnAllReduce) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Pair models(strategy);
    auto root = fsdp(*models.sharded);
    root.set_requires_all_reduce(false);
    models.backward(0, loss_of_a_part);
    models.backward(1, loss_of_the_last_block);
    auto loss = loss_of_the_last_block(models.sharded, global_batch(2));
    loss.register_hook([](const torch::Tensor&) { throw std::runtime_error("thrown in backward"); });
    EXPECT_ANY_THROW((loss * models.sharded->norm->weight.sum()).backward());
    root.set_requires_all_reduce(true);
    models.sharded->zero_grad();
    models.plain->zero_grad();
    models.backward(3, loss_of_a_part);
    models.expect_equal_gradients();
  }
}

TEST(GroupGradients, WhatAHookKeepsStaysAsItIs) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Pair models(strategy);
    auto weight = models.sharded->named_parameters()["blocks.1.up.weight"];
    torch::Tensor kept, value;
    weight.register_hook([&](const torch::Tensor& gradient) {
      if (kept.defined()) return;
      kept = gradient;
      value = full(gradient).clone();
    });
    models.backward(0);
    models.backward(1);
    torch::nn::utils::clip_grad_norm_(models.sharded->parameters(), 1e-3);
    EXPECT_TRUE(torch::equal(full(kept), value));
  }
}

TEST(GroupGradients, WhatAHookReturnsTwiceIsAddedTwice) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Pair models(strategy);
    auto weight = models.sharded->named_parameters()["blocks.1.up.weight"];
    auto ones = torch::ones_like(weight).detach();
    weight.register_hook([&](const torch::Tensor&) { return ones; });
    for (int64_t step = 0; step < 3; ++step) models.backward(step);
    EXPECT_TRUE(torch::equal(full(ones), torch::ones_like(full(ones))));
    EXPECT_TRUE(torch::equal(full(models.gradient("blocks.1.up.weight")), 3 * full(ones)));
  }
}

TEST(GroupGradients, AnotherDivideFactorAmidAnAccumulationIsAnError) {
  if (world_size() == 1) return;
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Pair models(strategy);
    auto root = fsdp(*models.sharded);
    root.set_is_last_backward(false);
    models.backward(0);
    EXPECT_THROWS_WITH(root.set_gradient_divide_factor(3), "are still being reduced, with another factor");
    root.set_is_last_backward(true);
    models.backward(1);
    models.expect_equal_gradients();
    EXPECT_NO_THROW(root.set_gradient_divide_factor(3));
    root.set_requires_all_reduce(false);
    models.backward(2);
    EXPECT_NO_THROW(root.set_gradient_divide_factor(4));
  }
}

} // namespace
} // namespace tessera::testing
