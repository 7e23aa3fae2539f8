// Which groups are gathered ahead of the one that is needed.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include <tessera/fsdp/call.h>
#include <tessera/fsdp/group/parameter_group.h>
#include <tessera/fsdp/meta_init.h>
#include <tessera/fsdp/model/sharded_module.h>

#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::prefetch_test {
namespace {

constexpr size_t kLayers = 5;

/// Layers in a row, each a group; notes which groups are open when a layer's forward has read its weight, and its backward.
struct Chain {
  Chain() {
    torch::manual_seed(0);
    for (size_t i = 0; i < kLayers; ++i) net->push_back(torch::nn::Linear(6, 6));
    for (const auto& layer : *net) layers.push_back(fully_shard(*layer.ptr(), world_mesh()));
    fully_shard(*net, world_mesh());
  }

  /// A letter a group: '1' for one that is gathered, or about to be.
  [[nodiscard]] std::string open() const {
    std::string text;
    for (const auto& layer : layers) text += layer.state()->group()->is_open() ? '1' : '0';
    return text;
  }

  /// A forward of some of the layers alone; what is open after each.
  std::vector<std::string> forward_of(const std::vector<size_t>& some) {
    std::vector<std::string> opened;
    auto x = torch::ones({2, 6}, test_device());
    for (const size_t i : some) {
      x = net[i]->as<torch::nn::Linear>()->forward(x);
      opened.push_back(open());
    }
    return opened;
  }

  /// The same, and its backward.
  std::vector<std::string> train_through(const std::vector<size_t>& some) {
    std::vector<std::string> opened;
    auto x = torch::ones({2, 6}, test_device());
    for (const size_t i : some) {
      x = net[i]->as<torch::nn::Linear>()->forward(x);
      opened.push_back(open());
    }
    x.sum().backward();
    net->zero_grad();
    return opened;
  }

  /// First reads whose gather they had to start themselves, since the last call.
  int64_t report() {
    int64_t misses = 0;
    for (const auto& group : fsdp(*net).report().groups) misses += group.prefetch_misses;
    return misses;
  }

  void step(bool with_backward = true) {
    in_forward.clear();
    in_backward.assign(kLayers, "");
    auto x = torch::ones({2, 6}, test_device());
    for (size_t i = 0; i < kLayers; ++i) {
      x = net[i]->as<torch::nn::Linear>()->forward(x);
      in_forward.push_back(open());
      // Where this layer's output gets its gradient, the one above has been read, reduced and freed.
      if (with_backward && i + 1 < kLayers) x.register_hook([this, i](const torch::Tensor&) { in_backward[i + 1] = open(); });
    }
    if (!with_backward) return;
    x.sum().backward();
    net->zero_grad();
  }

  torch::nn::Sequential net;
  std::vector<FSDPModule> layers;
  std::vector<std::string> in_forward, in_backward;
};

using Opened = std::vector<std::string>;

TEST(Prefetch, FollowsTheRegistrationInTheFirstForwardAndThenTheOrderOfTheLast) {
  if (world_size() == 1) GTEST_SKIP() << "one rank gathers nothing";
  Chain chain;
  const Opened expected{"11000", "01100", "00110", "00011", "00001"};
  chain.step(/*with_backward=*/false);
  EXPECT_EQ(chain.in_forward, expected);
  chain.step(/*with_backward=*/false); // an evaluation has an order too
  EXPECT_EQ(chain.in_forward, expected);
  for (int step = 0; step < 2; ++step) {
    chain.step();
    EXPECT_EQ(chain.in_forward, expected);
    EXPECT_EQ(Opened(chain.in_backward.begin() + 1, chain.in_backward.end()), (Opened{"10000", "01000", "00100", "00010"}));
  }
}

TEST(Prefetch, FollowsTheLastForwardThroughModulesThatItReadTwice) {
  if (world_size() == 1) GTEST_SKIP() << "one rank gathers nothing";
  Chain chain;
  fsdp(*chain.net).set_reporting(true);
  const std::vector<size_t> order{0, 1, 0, 2, 1, 3};
  for (int step = 0; step < 4; ++step) {
    const auto before = process_context().count(CollectiveKind::kAllGather).calls;
    chain.report();
    const auto opened = chain.train_through(order);
    if (step < 2) continue; // the first one cannot be told from several forwards
    EXPECT_EQ(opened, (Opened{"11000", "11000", "10100", "01100", "01010", "00010"})) << step;
    EXPECT_EQ(process_context().count(CollectiveKind::kAllGather).calls - before, 11) << "each read but that of 3 in backward";
    EXPECT_EQ(chain.report(), 1) << "reads that nothing had gathered for";
  }
  EXPECT_EQ(chain.train_through({0, 1, 2, 0, 3}), (Opened{"11000", "11000", "00110", "11010", "00010"})) << "departs from it";
}

TEST(Prefetch, WhatAForwardPassesOverIsFreed) {
  if (world_size() == 1) GTEST_SKIP() << "one rank gathers nothing";
  Chain evaluated, trained, first;
  {
    const torch::NoGradGuard no_grad;
    evaluated.step(/*with_backward=*/false);
    for (int step = 0; step < 2; ++step)
      EXPECT_EQ(evaluated.forward_of({0, 2, 4}), (Opened{"11000", "00110", "00001"})) << "against the recorded order";
    EXPECT_EQ(first.forward_of({0, 3}), (Opened{"11000", "01011"})) << "nothing is recorded yet";
    EXPECT_EQ(first.forward_of({0, 3}), (Opened{"10010", "00010"})) << "layers 1 and 4 are not in the order";
  }
  trained.step();
  EXPECT_EQ(trained.forward_of({0, 2, 4}), (Opened{"11000", "00100", "00001"}));
}

// FSDP2's post_backward, which then reshards nothing
TEST(Prefetch, WhatABackwardKeepsStaysUntilTheNextForwardHasReadIt) {
  if (world_size() == 1) GTEST_SKIP() << "one rank gathers nothing";
  Chain chain;
  fsdp(*chain.net).set_reshard_after_backward(false);
  const auto gathers = [] { return process_context().count(CollectiveKind::kAllGather).calls; };
  for (const int64_t expected : {9, 4, 4}) {
    const auto before = gathers();
    chain.step();
    EXPECT_EQ(gathers() - before, expected);
    EXPECT_EQ(chain.in_backward, (Opened{"", "11111", "01111", "00111", "00011"}));
    EXPECT_EQ(chain.open(), "11111");
  }
  EXPECT_EQ(chain.in_forward, (Opened{"11111", "01111", "00111", "00011", "00001"}));
  {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : chain.net->parameters()) parameter.add_(1);
  }
  chain.step();
  EXPECT_EQ(chain.in_forward, (Opened{"11000", "01100", "00110", "00011", "00001"})) << "gathered before the write";
  fsdp(*chain.net).set_reshard_after_backward(true);
  chain.step();
  EXPECT_EQ(chain.open(), "00000");
}

TEST(Prefetch, ABackwardThatMakesAGraphFreesWhatItHasPassed) {
  if (world_size() == 1) GTEST_SKIP() << "one rank gathers nothing";
  Chain chain;
  chain.step();
  for (const size_t first : {0, 1}) { // autograd leaves the weights out of a graph that ends in a layer's output
    Opened opened(kLayers);
    auto x = torch::ones({2, 6}, test_device()).requires_grad_();
    torch::Tensor input;
    for (size_t i = 0; i < kLayers; ++i) {
      if (i == first) input = x;
      x.register_hook([&chain, &opened, i](const torch::Tensor&) { opened[i] = chain.open(); });
      x = chain.net[i]->as<torch::nn::Linear>()->forward(x);
    }
    torch::autograd::grad({x.sum()}, {input}, {}, /*retain_graph=*/true, /*create_graph=*/true);
    Opened expected{"10000", "11000", "01100", "00110", "00011"};
    if (first == 1) expected[0] = "";
    EXPECT_EQ(opened, expected);
    EXPECT_EQ(chain.open(), "00000");
  }
}

TEST(Prefetch, WhatAListAsksForIsNotPassedOver) {
  if (world_size() == 1) GTEST_SKIP() << "one rank gathers nothing";
  Chain chain;
  const torch::NoGradGuard no_grad;
  chain.step(/*with_backward=*/false);
  chain.layers[2].set_modules_to_forward_prefetch({chain.layers[3], chain.layers[0]});
  EXPECT_EQ(chain.forward_of({2, 3, 0}), (Opened{"10110", "10011", "11001"})) << "layer 0 is read once more";
}

TEST(Prefetch, GoesAsDeepAsItIsSet) {
  if (world_size() == 1) GTEST_SKIP() << "one rank gathers nothing";
  Chain chain;
  fsdp(*chain.net).set_prefetch_depth(3);
  chain.layers[1].set_prefetch_depth(0);
  for (int step = 0; step < 3; ++step) {
    chain.step();
    EXPECT_EQ(chain.in_forward, (Opened{"11110", "01110", "00111", "00011", "00001"}));
    EXPECT_EQ(chain.in_backward[4], "01110");
    EXPECT_EQ(chain.in_backward[2], "11000");
  }
}

TEST(Prefetch, ListsTakeThePlaceOfTheOrder) {
  if (world_size() == 1) GTEST_SKIP() << "one rank gathers nothing";
  Chain chain;
  auto& layers = chain.layers;
  layers[0].set_modules_to_forward_prefetch({layers[2], layers[4]});
  layers[4].set_modules_to_backward_prefetch({layers[1]});
  for (int step = 0; step < 2; ++step) {
    chain.step();
    EXPECT_EQ(chain.in_forward, (Opened{"10101", "01101", "00111", "00011", "00001"}));
    EXPECT_EQ(chain.in_backward[4], "01000");
  }
  layers[0].set_modules_to_forward_prefetch({});
  layers[4].set_modules_to_backward_prefetch({});
  layers[3].set_unshard_in_backward(false);
  chain.step();
  EXPECT_EQ(chain.in_forward[0], "11000");
  EXPECT_EQ(chain.in_backward[4], "00000") << "the backward before layer 3 gathers nothing ahead";
  EXPECT_EQ(chain.in_backward[3], "00100") << "what reads it gathers it";
}

TEST(Prefetch, SettingsOfABlockStayWhenItsRootIsSharded) {
  if (world_size() == 1) GTEST_SKIP() << "one rank gathers nothing";
  torch::manual_seed(0);
  torch::nn::Sequential net(torch::nn::Linear(6, 6), torch::nn::Linear(6, 6));
  auto first = fully_shard(*net[0], world_mesh());
  const auto second = fully_shard(*net[1], world_mesh());
  first.set_prefetch_depth(0);
  fully_shard(*net, world_mesh());
  net[0]->as<torch::nn::Linear>()->forward(torch::ones({2, 6}, test_device()));
  EXPECT_FALSE(second.state()->group()->is_open());
}

TEST(Prefetch, PassesOverWhatHasNoMemoryYet) {
  torch::nn::Sequential net(torch::nn::Linear(6, 6), on_meta([] { return torch::nn::Linear(6, 6); }));
  torch::nn::init::ones_(net[0]->as<torch::nn::Linear>()->weight);
  torch::nn::init::ones_(net[0]->as<torch::nn::Linear>()->bias);
  fully_shard(*net[0], world_mesh());
  fully_shard(*net[1], world_mesh());
  fully_shard(*net, world_mesh());
  EXPECT_EQ(net[0]->as<torch::nn::Linear>()->forward(torch::ones({2, 6}, test_device())).size(0), 2);
}

TEST(Prefetch, NeedsModulesOfTheSameModelAndAGroup) {
  Chain chain, other;
  EXPECT_THROWS_WITH(chain.layers[0].set_modules_to_forward_prefetch({other.layers[1]}), "belongs to another model");
  EXPECT_THROWS_WITH(fsdp(*chain.net).set_modules_to_backward_prefetch({chain.layers[1]}), "has no parameters of its own");
  EXPECT_THROWS_WITH(chain.layers[0].set_prefetch_depth(-1), "-1 groups cannot be gathered ahead");
}

TEST(UnshardAsync, GathersWhileOtherWorkRuns) {
  Chain chain;
  const auto x = torch::ones({2, 6}, test_device());
  const auto expected = call(chain.net, x).detach(); // whose end frees what it gathered
  process_context().reset_counters();
  auto handle = chain.layers[3].unshard_async();
  auto dropped = chain.layers[2].unshard_async();
  if (world_size() > 1) EXPECT_EQ(chain.open(), "00110");
  handle.wait();
  handle.wait();
  EXPECT_EQ(process_context().count(CollectiveKind::kAllGather).calls, world_size() > 1 ? 2 : 0);
  EXPECT_TENSORS_CLOSE(chain.net->forward(x).detach(), expected);
  EXPECT_EQ(process_context().count(CollectiveKind::kAllGather).calls, world_size() > 1 ? 5 : 0) << "each group once";
  chain.layers[3].reshard();
  handle.wait(); // of a group that was freed: nothing to wait for
  if (world_size() > 1) EXPECT_FALSE(chain.layers[3].state()->group()->is_open());
}

} // namespace
} // namespace tessera::testing::prefetch_test
