// Gradients of parameters that a backward does not use, on some ranks or on all.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>

#include <tessera/dtensor/api.h>
#include <tessera/fsdp/fully_shard.h>

#include <tessera/tests/fsdp/equivalence/layers.h>
#include <tessera/tests/fsdp/twin.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::unused_test {
namespace {

TEST(Unused, OnSomeRanksIsZeroThere) {
  struct BranchesImpl : torch::nn::Module {
    BranchesImpl() {
      left = register_module("left", torch::nn::Linear(5, 3));
      right = register_module("right", torch::nn::Linear(5, 3));
      never = register_module("never", torch::nn::Linear(5, 3));
    }
    torch::nn::Linear left{nullptr}, right{nullptr}, never{nullptr};
  };
  for (const auto layout : {BufferLayout::kRagged, BufferLayout::kPerParameter}) {
    torch::manual_seed(0);
    auto plain = std::make_shared<BranchesImpl>();
    torch::manual_seed(0);
    auto net = std::make_shared<BranchesImpl>();
    FullyShardOptions options;
    options.layout = layout;
    fully_shard(*net, world_mesh(), options);
    const auto x = torch::arange(10, torch::kFloat).view({2, 5});
    const auto run = [&](BranchesImpl& model, int64_t rank) {
      const auto input = x.to(model.left->weight.device());
      return (rank % 2 == 0 ? model.left(input) : model.right(input) + model.left(input)).sum();
    };
    run(*net, world_rank()).backward();
    auto total = torch::zeros({});
    for (int64_t rank = 0; rank < world_size(); ++rank) total = total + run(*plain, rank) / world_size();
    total.backward();
    for (const auto& name : {"left.weight", "left.bias", "right.weight", "right.bias", "never.weight"}) {
      const auto got = net->named_parameters()[name].grad(), expected = plain->named_parameters()[name].grad();
      ASSERT_EQ(got.defined(), expected.defined()) << name;
      if (got.defined()) {
        EXPECT_TRUE(torch::allclose(full(got), expected)) << name;
      }
    }
  }
}

TEST(Unused, OnAllRanksKeepsAnUndefinedGradient) {
  for (const auto& strategy : equivalence_strategies()) {
    SCOPED_TRACE(strategy.name);
    const auto model = sharded_case<Layers>(strategy);
    model->b(model->a(model->input_of(0, 0))).mean().backward();
    EXPECT_TRUE(model->b->bias.grad().defined());
    EXPECT_FALSE(model->head->weight.grad().defined());
    (model->head->weight.sum() + model->a->weight.sum()).backward();
    EXPECT_TRUE(model->head->weight.grad().defined());
    EXPECT_FALSE(model->head->bias.grad().defined());
  }
}

} // namespace
} // namespace tessera::testing::unused_test
