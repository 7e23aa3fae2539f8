// What stands for a sharded parameter in autograd's graphs, from its read to its backward: frozen in between, detached, saved, or
// read among DTensors.
#include <tessera/activations/recompute.h>
#include <tessera/activations/saved_tensors.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/unsharded.h>

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include <tessera/tests/fsdp/twin.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::leaves_test {
namespace {

using torch::Tensor;

void set_requires_grad(torch::nn::Module& module, bool required) {
  for (auto& parameter : module.parameters()) parameter.requires_grad_(required);
}

/// This rank's part of the loss of a model that is sharded, or all of it.
Tensor loss_on(Net& net, int64_t step, bool is_sharded) {
  const auto batch = global_batch(step);
  return loss_of(net, is_sharded ? part_of(batch, world_rank(), world_size()) : batch);
}

/// `run` on a model beside its unsharded twin, under each strategy: the same gradients.
void expect_gradients_of_plain(const std::function<void(Net&, bool is_sharded)>& run) {
  Net plain = make_net();
  run(plain, false);
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Net sharded = make_net();
    shard_model(sharded, strategy);
    run(sharded, true);
    expect_equal_gradients(sharded, plain);
  }
}

/// As a discriminator is read for its own loss, and then, frozen, for the generator's.
TEST(Leaves, AFrozenReadKeepsTheGradientsOfTheForwardBeforeIt) {
  expect_gradients_of_plain([](Net& net, bool is_sharded) {
    const auto trained = loss_on(net, 0, is_sharded);
    set_requires_grad(*net, false);
    const auto frozen = loss_on(net, 1, is_sharded);
    EXPECT_FALSE(frozen.requires_grad());
    set_requires_grad(*net, true);
    trained.backward();
  });
}

TEST(Leaves, AParameterMayBeFrozenAndTrainedByTurns) {
  expect_gradients_of_plain([](Net& net, bool is_sharded) {
    for (int64_t step = 0; step < 3; ++step) {
      loss_on(net, step, is_sharded).backward();
      net->embed->weight.requires_grad_(false);
      const auto partly = loss_on(net, step + 3, is_sharded);
      net->embed->weight.requires_grad_(true);
      partly.backward(); // through the blocks alone
    }
  });
}

TEST(Leaves, AWriteInPlaceToAFrozenLeafIsSeen) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Net net = make_net();
    shard_model(net, strategy);
    const auto trained = loss_on(net, 0, true);
    set_requires_grad(*net, false);
    auto whole = unsharded(net->norm->weight);
    EXPECT_FALSE(whole.requires_grad());
    whole.fill_(3);
    EXPECT_TENSORS_EQUAL(full(net->norm->weight.detach()), torch::full({18}, 3.0));
  }
}

/// A sharded copy of a parameter.
Tensor zeros_beside(const Tensor& parameter) {
  const torch::NoGradGuard no_grad;
  return parameter.clone().zero_();
}

TEST(Leaves, OneFrozenBeforeItsBackwardHasNoGradientOfOpsAmongDTensors) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Net net = make_net();
    shard_model(net, strategy);
    auto weight = net->embed->weight;
    const auto penalty = (weight - zeros_beside(weight)).square().sum();
    weight.requires_grad_(false);
    penalty.backward();
    EXPECT_FALSE(weight.grad().defined());
    weight.requires_grad_(true);
    (weight - zeros_beside(weight)).square().sum().backward();
    EXPECT_TENSORS_CLOSE(full(weight.grad()), 2 * full(weight.detach()));
  }
}

TEST(Leaves, AGraphOfAGradientAmongDTensorsIsRefused) {
  Net net = make_net();
  shard_model(net, strategies()[0]);
  const auto penalty = (net->embed->weight - zeros_beside(net->embed->weight)).pow(4).sum();
  EXPECT_THROWS_WITH(penalty.backward({}, /*retain_graph=*/true, /*create_graph=*/true),
                     "backward(create_graph=true) reached the sharded parameter embed.weight");
}

TEST(Leaves, ADetachedCopyHasAGradientOfItsOwnAmongDTensorsAndIsRefusedInAForward) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Net net = make_net();
    shard_model(net, strategy);
    auto copy = net->embed->weight.detach().requires_grad_();
    (copy - zeros_beside(copy)).square().sum().backward();
    EXPECT_FALSE(net->embed->weight.grad().defined());
    ASSERT_TRUE(copy.grad().defined());
    EXPECT_TENSORS_CLOSE(full(copy.grad()), 2 * full(net->embed->weight.detach()));
    const auto x = torch::ones({2, 18}, test_device());
    EXPECT_THROWS_WITH(torch::linear(x, copy),
                       "a detached copy of the sharded parameter embed.weight that requires a gradient of its own is read");
    const torch::NoGradGuard no_grad;
    EXPECT_NO_THROW(torch::linear(x, copy));
  }
}

/// Where autograd saves the parameter by way of hooks, it hands back a copy.
TEST(Leaves, ASavedParameterIsTheParameter) {
  const auto layer = [](const Tensor& x, const Tensor& weight) { return x.matmul(weight.t()).tanh(); };
  const std::vector<std::pair<std::string, std::function<Tensor(const Tensor&, const Tensor&)>>> ways{
      {"in a place",
       [&](const Tensor& x, const Tensor& weight) { return recompute({.place = host_memory()}, layer, x, weight); }},
      {"nested",
       [&](const Tensor& x, const Tensor& weight) {
         return recompute([&](const Tensor& in, const Tensor& w) { return recompute(layer, in, w); }, x, weight);
       }},
      {"where saved tensors lie elsewhere", [&](const Tensor& x, const Tensor& weight) {
         const auto scope = saved_tensors_in(host_memory());
         return recompute(layer, x, weight);
       }}};
  const auto x = torch::randn({12, 18}, at::detail::createCPUGenerator(3));
  for (const auto& [name, way] : ways) {
    SCOPED_TRACE(name);
    expect_gradients_of_plain([&, &way = way](Net& net, bool is_sharded) {
      const auto input = is_sharded ? part_of(x, world_rank(), world_size()).to(test_device()) : x;
      way(input, net->embed->weight).square().mean().backward();
    });
  }
}

/// Which an evaluation before the change has not looked for.
TEST(Leaves, AParameterRegisteredAfterAnEvaluationIsAnErrorInTheNextForward) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Net net = make_net();
    shard_model(net, strategy);
    {
      const torch::NoGradGuard no_grad;
      loss_on(net, 0, true);
    }
    net->register_parameter("added", torch::zeros({3}));
    EXPECT_THROWS_WITH(loss_on(net, 1, true), "added");
  }
}

} // namespace
} // namespace tessera::testing::leaves_test
