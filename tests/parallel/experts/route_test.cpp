// Which experts tokens choose, and the losses of routers.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/activations/recompute.h>
#include <tessera/collectives/process_context.h>
#include <tessera/parallel/experts.h>

#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/test_device.h>
#include <tessera/tests/support/world.h>

#include <cmath>
#include <limits>

namespace tessera::testing::route_test {
namespace {

using torch::Tensor;

Tensor logits_of(int64_t tokens, int64_t experts, uint64_t seed = 1) {
  auto generator = at::detail::createCPUGenerator(seed);
  return torch::randn({tokens, experts}, generator);
}

std::vector<int64_t> row(const Tensor& tensor, int64_t index) {
  const auto values = tensor[index].contiguous();
  return {values.const_data_ptr<int64_t>(), values.const_data_ptr<int64_t>() + values.numel()};
}

TEST(Route, TakesTheBestOfASoftmax) {
  const auto logits = logits_of(50, 8);
  const auto routing = route(logits, {.top_k = 3, .renormalize = false, .scale = 2});
  const auto [values, places] = torch::softmax(logits, 1).topk(3, 1);
  EXPECT_TRUE(torch::equal(routing.experts, places));
  EXPECT_TENSORS_CLOSE(routing.weights, 2 * values, 1e-6, 1e-7);
  EXPECT_TRUE(torch::equal(routing.counts, torch::bincount(places.flatten(), {}, 8)));
  const auto normal = route(logits, {.top_k = 3});
  EXPECT_TENSORS_CLOSE(normal.weights, torch::softmax(logits.gather(1, places), 1), 1e-5, 1e-6)
      << "the softmax of the best logits alone";
}

TEST(Route, TakesTheFirstOfEqualScores) {
  const auto routing = route(torch::zeros({5, 6}), {.top_k = 2});
  for (int64_t token = 0; token < 5; ++token) EXPECT_EQ(row(routing.experts, token), (std::vector<int64_t>{0, 1}));
  EXPECT_TENSORS_CLOSE(routing.weights, torch::full({5, 2}, 0.5), 1e-6, 1e-7);
}

TEST(Route, AddsABiasForTheChoiceAlone) {
  const auto logits = torch::tensor({{2.0F, 1.0F, 0.0F, -1.0F}});
  const auto bias = torch::tensor({0.0F, 0.0F, 0.0F, 5.0F});
  const auto routing = route(logits, {.top_k = 2, .score = RouterScore::kSigmoid, .renormalize = false}, bias);
  EXPECT_EQ(row(routing.experts, 0), (std::vector<int64_t>{3, 0}));
  EXPECT_TENSORS_CLOSE(routing.weights, torch::sigmoid(torch::tensor({{-1.0F, 2.0F}})), 1e-6, 1e-7);
}

TEST(Route, ChoosesWithinTheBestGroups) {
  // The third expert is the best of all, but its group has the smallest sum of two.
  const auto logits = torch::tensor({{1.0F, 0.9F, 1.1F, -9.0F, 0.8F, 0.7F}});
  const auto routing = route(logits, {.top_k = 2, .score = RouterScore::kSigmoid, .groups = 3, .top_groups = 2});
  EXPECT_EQ(row(routing.experts, 0), (std::vector<int64_t>{0, 1}));
  const auto all = route(logits, {.top_k = 2, .score = RouterScore::kSigmoid, .groups = 3, .top_groups = 3});
  EXPECT_EQ(row(all.experts, 0), (std::vector<int64_t>{2, 0}));
}

TEST(Route, ComputesHalvesInFloatAndDoublesInDouble) {
  const auto logits = logits_of(9, 4);
  EXPECT_EQ(route(logits.to(torch::kBFloat16)).scores.scalar_type(), torch::kFloat);
  EXPECT_EQ(route(logits.to(torch::kDouble)).weights.scalar_type(), torch::kDouble);
}

TEST(Route, RefusesWhatDoesNotFit) {
  const auto logits = logits_of(4, 6);
  EXPECT_THROWS_WITH(route(logits, {.top_k = 7}), "route: top_k is 7, of 6 experts");
  EXPECT_THROWS_WITH(route(logits, {.top_k = 0}), "route: top_k is 0, of 6 experts");
  EXPECT_THROWS_WITH(route(logits, {.groups = 4}), "route: 6 experts in 4 groups, which do not divide them");
  EXPECT_THROWS_WITH(route(logits, {.groups = 3, .top_groups = 4}), "route: top_groups is 4, of 3 groups");
  EXPECT_THROWS_WITH(route(logits, {.top_k = 3, .groups = 3, .top_groups = 1}), "1 of 3 groups have 2 experts");
  EXPECT_THROWS_WITH(route(logits, {}, torch::zeros({5})), "the bias has the shape [5], but there are 6 experts");
  EXPECT_THROWS_WITH(route(logits[0]), "must be floating-point numbers [tokens, experts]");
}

TEST(Route, KeepsItsChoiceInASecondRun) {
  const auto x = torch::ones({3, 4}).requires_grad_();
  int64_t runs = 0;
  std::vector<Tensor> chosen;
  const auto function = [&](const Tensor& input) {
    const auto noise = torch::zeros({3, 4}).index_fill_(1, torch::tensor({runs++ % 4}), 5.0); // another best expert each time
    const auto routing = route(input + noise, {.top_k = 1, .renormalize = false});
    chosen.push_back(routing.experts);
    return routing.weights.sin().sum();
  };
  recompute(function, x).backward();
  ASSERT_EQ(chosen.size(), 2U);
  EXPECT_TRUE(torch::equal(chosen[0], chosen[1]));
  chosen.clear();
  const auto outer = [&](const Tensor& input) { return recompute(function, input.sin()) + recompute(function, input.cos()); };
  recompute(outer, x).backward();
  ASSERT_GE(chosen.size(), 4U);
  for (size_t i = 2; i < chosen.size(); ++i) {
    EXPECT_TRUE(torch::equal(chosen[i], chosen[0]) || torch::equal(chosen[i], chosen[1])) << "run " << i << " chose anew";
  }
}

TEST(RouterLosses, FollowTheirFormulas) {
  const auto logits = logits_of(30, 5).requires_grad_();
  const auto routing = route(logits, {.top_k = 2});
  const auto all = count_tokens(routing);
  double expected = 0;
  for (int64_t i = 0; i < 5; ++i) expected += routing.scores.select(1, i).sum().item<double>() * routing.counts[i].item<double>();
  expected *= 5.0 / (2 * 30 * 30);
  EXPECT_NEAR(load_balancing_loss(routing, all).item<double>(), expected, 1e-5);
  EXPECT_NEAR(sequence_balancing_loss(routing, 1).item<double>(), expected, 1e-5);
  EXPECT_NEAR(router_z_loss(logits, all).item<double>(), torch::logsumexp(logits, 1).square().mean().item<double>(), 1e-5);
  double mean = 0;
  for (int64_t i = 0; i < 3; ++i) {
    const auto part = route(logits.slice(0, 10 * i, 10 * i + 10), {.top_k = 2});
    mean += load_balancing_loss(part, count_tokens(part)).item<double>() / 3;
  }
  EXPECT_NEAR(sequence_balancing_loss(routing, 3).item<double>(), mean, 1e-5);
  EXPECT_THROWS_WITH(sequence_balancing_loss(routing, 7), "30 tokens are not 7 sequences of one length");
}

TEST(RouterLosses, AreOneWhereAllIsBalanced) {
  const auto routing = route(torch::eye(4).repeat({3, 1}) * 0.01, {.top_k = 1});
  EXPECT_NEAR(load_balancing_loss(routing, count_tokens(routing)).item<double>(), 1, 1e-4);
}

TEST(RouterLosses, AreInjectedAsGradients) {
  const auto x = torch::randn({6, 4}).requires_grad_();
  const auto loss = x.square().sum();
  const auto y = inject_loss(x * 3, loss, 0.5);
  EXPECT_TRUE(torch::equal(y, x * 3));
  y.sum().backward();
  EXPECT_TENSORS_CLOSE(x.grad(), 3 + x.detach(), 1e-6, 1e-6);
  EXPECT_THROWS_WITH(inject_loss(x, x), "must have no dims");
}

/// Of each rank's part of the tokens the mean over the ranks is the loss of all.
TEST(RouterLosses, AreThoseOfAllTokensOnAnyNumberOfRanks) {
  const auto mesh = init_device_mesh(test_device_type(), {world_size()}, {"dp"});
  const auto logits = logits_of(24, 8).requires_grad_();
  const auto whole = route(logits, {.top_k = 2});
  const auto alone = count_tokens(whole);
  const auto expected = load_balancing_loss(whole, alone) + router_z_loss(logits, alone);
  const auto expected_gradient = torch::autograd::grad({expected}, {logits})[0];
  const auto mine =
      logits.detach().tensor_split(world_size())[static_cast<size_t>(world_rank())].to(mesh.device()).requires_grad_();
  const auto routing = route(mine, {.top_k = 2});
  const auto all = count_tokens(routing, mesh);
  EXPECT_TRUE(torch::equal(all.counts.cpu(), whole.counts));
  const auto loss = load_balancing_loss(routing, all) + router_z_loss(mine, all);
  const auto gradient = torch::autograd::grad({loss}, {mine})[0] / world_size();
  const auto part = expected_gradient.tensor_split(world_size())[static_cast<size_t>(world_rank())];
  EXPECT_TENSORS_CLOSE(gradient.cpu(), part, 1e-5, 1e-8);
  auto sum = loss.detach().reshape({1}).clone();
  mesh.communicator()->all_reduce(sum, ReduceOp::kAvg, "loss").wait();
  EXPECT_NEAR(sum.item<double>(), expected.item<double>(), 1e-5);
}

/// What one process drops, any number of ranks drops.
TEST(Capacity, IsOfTheTokensOfAllRanks) {
  const auto mesh = init_device_mesh(test_device_type(), {world_size()}, {"dp"});
  for (const auto drop : {CapacityDrop::kLowestScore, CapacityDrop::kLastToken}) {
    for (const double factor : {0.25, 0.5, 1.0, 1.5, 8.0}) {
      SCOPED_TRACE(c10::str(static_cast<int>(drop), " ", factor));
      const auto logits = logits_of(23, 6) + torch::arange(6) * 0.5;
      const auto whole = limit_to_capacity(route(logits), {factor, drop});
      const auto most = static_cast<int64_t>(std::ceil(factor * 23 * 2 / 6));
      const auto kept = torch::bincount(whole.experts.masked_select(whole.experts.ge(0)), {}, 6);
      EXPECT_TRUE(torch::equal(kept, whole.counts.clamp_max(most)));
      EXPECT_TRUE(torch::equal(whole.weights.eq(0), whole.experts.eq(-1)));
      const auto rows = world_rank();
      const auto mine = limit_to_capacity(route(logits.tensor_split(world_size())[static_cast<size_t>(rows)].to(mesh.device())),
                                          {factor, drop}, mesh);
      EXPECT_TRUE(torch::equal(mine.experts.cpu(), whole.experts.tensor_split(world_size())[static_cast<size_t>(rows)]));
    }
  }
  EXPECT_THROWS_WITH(limit_to_capacity(route(logits_of(2, 2)), {.factor = 0}), "the factor is 0, but must be positive");
}

TEST(Capacity, DropsTheSmallestWeights) {
  const auto logits = torch::tensor({{3.0F, 0.0F}, {1.0F, 0.0F}, {2.0F, 0.0F}, {4.0F, 0.0F}});
  const auto by_score = limit_to_capacity(route(logits, {.top_k = 1, .renormalize = false}), {.factor = 1});
  EXPECT_TRUE(torch::equal(by_score.experts.flatten(), torch::tensor({0, -1, -1, 0}, torch::kLong)));
  const auto by_order = limit_to_capacity(route(logits, {.top_k = 1}), {1, CapacityDrop::kLastToken});
  EXPECT_TRUE(torch::equal(by_order.experts.flatten(), torch::tensor({0, 0, -1, -1}, torch::kLong)));
}

} // namespace
} // namespace tessera::testing::route_test
