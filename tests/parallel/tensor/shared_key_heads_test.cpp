// Grouped queries whose key heads do not divide among the ranks: computed in groups of ranks, beside one process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/dtensor/debug.h>
#include <tessera/dtensor/strict_sharding.h>
#include <tessera/fsdp/fully_shard.h>

#include <tessera/tests/parallel/tensor/key_heads_net.h>
#include <tessera/tests/support/autocast.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>

#include <functional>
#include <numeric>
#include <utility>
#include <vector>

namespace tessera::testing::shared_key_heads_test {
namespace {

namespace nn = torch::nn;
using torch::Tensor;
using namespace key_heads; // NOLINT(google-build-using-namespace)

/// Every number of heads, with and without what a module may do besides.
std::vector<NetOptions> nets() {
  std::vector<NetOptions> all;
  for (const int64_t heads : {1, 2, 3, 4, 6}) {
    all.push_back({.key_heads = heads});
    all.push_back({.key_heads = heads, .mixing = Mixing::kRepeated, .has_bias = true});
    all.push_back({.key_heads = heads, .mixing = Mixing::kExpanded});
    all.push_back({.key_heads = heads, .has_bias = true, .has_key_norm = true, .recomputes = heads % 2 == 0});
  }
  return all;
}

TEST(SharedKeyHeads, TrainAsInOneProcess) {
  const StrictSharding strict;
  for (const auto& options : sweep(nets(), 3, [](const auto& each) { return each.key_heads == 2 && each.has_key_norm; })) {
    auto twin = seeded(options);
    const auto expected = train(twin);
    for (const bool is_sequence : {false, true}) {
      SCOPED_TRACE(c10::str(options.text(), is_sequence ? ", sequence" : ""));
      auto net = seeded(options);
      parallelize(*net, tensor_mesh(), plan_of(options, is_sequence));
      expect_same(train(net), expected);
    }
  }
}

/// The groups of the ranks that have the same key heads.
int64_t groups_of(int64_t key_heads) { return std::gcd(key_heads, world_size()); }

/// Products and activations of key heads are a part, weights and their checkpoints whole.
TEST(SharedKeyHeads, EachGroupComputesItsOwn) {
  for (const int64_t key_heads : {1, 2, 3, 4, 6}) {
    SCOPED_TRACE(key_heads);
    const NetOptions options{.key_heads = key_heads, .has_bias = true};
    auto twin = seeded(options), net = seeded(options);
    const auto plan = plan_of(options, /*is_sequence=*/false);
    parallelize(*net, tensor_mesh(), plan);
    auto &block = net->blocks[0], &whole = twin->blocks[0];
    torch::manual_seed(5);
    const auto x = torch::randn({kRows, kTime, kWidth});
    const DTensor keys(block->k(x));
    EXPECT_EQ(keys.sizes(), whole->k(x).sizes());
    EXPECT_EQ(keys.local().numel() * groups_of(key_heads), keys.numel());
    EXPECT_TENSORS_CLOSE(whole_of(keys), whole->k(x).detach(), 1e-6, 1e-6);
    if (key_heads % world_size() == 0) continue; // Colwise
    EXPECT_EQ(DTensor(block->k->weight).placements(), Placements{Replicate{}});
    EXPECT_EQ(DTensor(block->k->weight).mesh(), tensor_mesh());
  }
}

/// A step sends what one without groups does: no activation of keys moves, and the gradients of the weights are one all-reduce.
TEST(SharedKeyHeads, MoveNoActivations) {
  const int64_t ranks = world_size();
  for (const auto& [key_heads, is_sharded] :
       std::vector<std::pair<int64_t, bool>>{{1, false}, {2, false}, {6, false}, {2, true}}) {
    if (key_heads % ranks == 0) continue;
    SCOPED_TRACE(c10::str(key_heads, is_sharded ? ", sharded" : ""));
    const StrictSharding strict;
    auto block = seeded({.key_heads = key_heads, .has_bias = true})->blocks[0];
    const auto mesh = init_device_mesh(test_device_type(), {1, ranks}, {"dp", "tp"});
    parallelize(*block, mesh["tp"], {{"q", Colwise{}}, {"[kv]", KeyHeads{key_heads}}, {"o", Rowwise{}}});
    if (is_sharded) fully_shard(*block, mesh["dp"]);
    constexpr int64_t kActivation = kRows * kTime * kWidth * 4;
    const int64_t weights = 2 * key_heads * kSize * (kWidth + 1) * 4;
    for (int step = 0; step < 2; ++step) { // the second one has its communicators
      const auto x = torch::randn({kRows, kTime, kWidth}).requires_grad_();
      const CountCollectives forward;
      const auto loss = block(from_local(x, mesh["tp"], {Replicate{}})).square().mean();
      EXPECT_EQ(forward.total_bytes(), kActivation) << forward.to_string();
      EXPECT_EQ(forward.count(CollectiveKind::kAllReduce).calls, 1);
      const CountCollectives backward;
      loss.backward();
      EXPECT_EQ(backward.count(CollectiveKind::kAllReduce).calls, 2) << backward.to_string();
      EXPECT_EQ(backward.total_bytes(), kActivation + weights) << backward.to_string();
    }
  }
}

/// What has no rule for heads of groups is right, and sends more. StrictSharding names it.
TEST(SharedKeyHeads, AreGatheredWhereAModuleMixesByHand) {
  for (const int64_t key_heads : {1, 2, 3, 6}) {
    const NetOptions options{.key_heads = key_heads, .mixing = Mixing::kByHand, .has_bias = true, .has_key_norm = true};
    SCOPED_TRACE(options.text());
    auto twin = seeded(options), net = seeded(options);
    parallelize(*net, tensor_mesh(), plan_of(options, /*is_sequence=*/false));
    expect_same(train(net, 0, 1, 4), train(twin, 0, 1, 4));
  }
}

TEST(SharedKeyHeads, MeetOthersOfTheSameRanks) {
  if (world_size() != 4) GTEST_SKIP() << "two groups of two ranks";
  auto block = seeded({.key_heads = 2})->blocks[0];
  parallelize(*block, tensor_mesh(), {{"q", Colwise{}}, {"[kv]", KeyHeads{2}}, {"o", Rowwise{}}});
  torch::manual_seed(8);
  const auto x = torch::randn({kRows, kTime, kWidth});
  const auto in_heads = [](const Tensor& y) { return y.unflatten(-1, {-1, kSize}).transpose(1, 2); };
  const auto queries = in_heads(block->q(x)), keys = in_heads(block->k(x));
  const auto both = torch::cat({queries, keys}, 1);
  const auto expected = torch::cat({whole_of(queries), whole_of(keys)}, 1);
  EXPECT_TENSORS_EQUAL(whole_of(both), expected);
  both.square().sum().backward();
  const auto gradient = whole_of(block->k->weight.grad());
  EXPECT_TENSORS_CLOSE(gradient, 2 * torch::einsum("bto,bti->oi", {whole_of(block->k(x)), x}), 1e-4, 1e-5);
  const auto width = torch::ones({kSize}), wide = whole_of(block->k->weight).sum(0);
  EXPECT_TENSORS_CLOSE(whole_of(keys * from_local(width, tensor_mesh(), {Replicate{}})), whole_of(keys), 0, 0);
  EXPECT_TENSORS_CLOSE(whole_of(block->k(x) + block->q(x).narrow(-1, 0, 2 * kSize)),
                       whole_of(block->k(x)) + whole_of(block->q(x)).narrow(-1, 0, 2 * kSize), 1e-6, 1e-6);
  const StrictSharding strict;
  EXPECT_THROWS_WITH(torch::cat({queries, keys}, 1),
                     "it would have to be gathered, and the plan of `parallelize` does not say so");
  EXPECT_THROWS_WITH(block->o(block->k(x).repeat({1, 1, 6})), "would have to become");
  EXPECT_THROWS_WITH(block->q(block->k(x)), "the activation is on DeviceMesh");
}

/// Whoever says where a layer's results go gets them there.
TEST(SharedKeyHeads, GoWhereAPlanSays) {
  auto block = seeded({.key_heads = 2})->blocks[0];
  parallelize(*block, tensor_mesh(), {{"k", KeyHeads{2}}, {"k", PrepareOutput{Replicate{}}}});
  const DTensor keys(block->k(torch::ones({kRows, kTime, kWidth})));
  EXPECT_EQ(keys.mesh(), tensor_mesh());
  EXPECT_EQ(keys.placements(), Placements{Replicate{}});
}

/// Parts of a weight, biases that are none of the module's, and activations that a plan does not make whole.
TEST(SharedKeyHeads, AreReadInOtherWays) {
  if (world_size() != 4) GTEST_SKIP() << "two groups of two ranks";
  auto twin = seeded({.key_heads = 6, .has_bias = true})->blocks[0],
       block = seeded({.key_heads = 6, .has_bias = true})->blocks[0];
  parallelize(*block, tensor_mesh(), {{"k", KeyHeads{6}}});
  torch::manual_seed(8);
  const auto x = torch::randn({kRows, kTime, kWidth}), bias = torch::randn({6 * kSize});
  const auto expect_alike = [&](const std::function<Tensor(Block&)>& read) {
    const auto got = read(block), expected = read(twin);
    EXPECT_TENSORS_CLOSE(whole_of(got), expected.detach(), 1e-5, 1e-5);
    for (auto* each : {&twin, &block}) (*each)->zero_grad();
    got.square().sum().backward();
    expected.square().sum().backward();
    EXPECT_TENSORS_CLOSE(whole_of(block->k->weight.grad()), twin->k->weight.grad(), 1e-4, 1e-4);
  };
  expect_alike([&](Block& each) { return torch::linear(x, each->k->weight, bias); });
  expect_alike([&](Block& each) { return torch::linear(x, each->k->weight, each->k->bias); });
  expect_alike([&](Block& each) { return torch::linear(x, each->k->weight, bias.narrow(0, 0, 1)); });
  expect_alike([&](Block& each) { return torch::addmm(each->k->bias, x[0], each->k->weight.t()); });
  expect_alike([&](Block& each) { return torch::addmm(bias.unsqueeze(0), x[0], each->k->weight.t()); });
  expect_alike([&](Block& each) { return torch::mm(x[0], each->k->weight.t()); });
  expect_alike([&](Block& each) { return torch::linear(x[0][0], each->k->weight, each->k->bias); });
  expect_alike([&](Block& each) { return torch::linear(x, each->k->weight.narrow(0, 1, 3)); });
  expect_alike([&](Block& each) { return torch::linear(x, each->k->weight.narrow(0, 2, 8)); });
  expect_alike([&](Block& each) {
    return torch::matmul(x.unsqueeze(1), each->k->weight.view({6, kSize, kWidth}).transpose(1, 2));
  });
  expect_alike([&](Block& each) { return each->k(x) + torch::linear(x, each->k->weight * 2); });
  auto other = seeded({.key_heads = 6})->blocks[0], whole = seeded({.key_heads = 6})->blocks[0];
  parallelize(*other, tensor_mesh(), {{"k", KeyHeads{6}}, {"k", PrepareInput{Shard{1}}}});
  EXPECT_TENSORS_CLOSE(whole_of(other->k(x)), whole->k(x).detach(), 1e-5, 1e-5);
}

/// Beside layers that overlap, and in other precisions.
TEST(SharedKeyHeads, ComputeBesideLayersThatOverlap) {
  const NetOptions options{.key_heads = 2, .has_bias = true, .has_key_norm = true};
  auto twin = seeded(options), net = seeded(options);
  parallelize(*net, tensor_mesh(), plan_of(options, /*is_sequence=*/true), {.overlap = {.when = Overlap::kAlways, .chunks = 2}});
  const StrictSharding strict;
  expect_same(train(net, 0, 1, 5), train(twin, 0, 1, 5));
}

TEST(SharedKeyHeads, ComputeUnderAutocast) {
  for (const auto mixing : {Mixing::kGrouped, Mixing::kExpanded}) {
    const NetOptions options{.key_heads = 2, .mixing = mixing, .has_bias = true, .has_key_norm = true};
    auto twin = seeded(options)->blocks[0], block = seeded(options)->blocks[0];
    parallelize(*block, tensor_mesh(), {{"q", Colwise{}}, {"[kv]", KeyHeads{2}}, {"o", Rowwise{}}});
    torch::manual_seed(7);
    const auto x = torch::randn({kRows, kTime, kWidth});
    for (auto* each : {&twin, &block}) {
      const AutocastScope autocast;
      (*each)(x).to(torch::kFloat).square().mean().backward();
    }
    const auto expected = twin->named_parameters();
    for (const auto& item : block->named_parameters()) {
      const auto wanted = expected[item.key()].grad(), got = whole_of(item.value().grad());
      EXPECT_LE((got - wanted).norm().item<double>(), 0.02 * wanted.norm().item<double>() + 1e-4) << item.key();
    }
  }
}

/// Writes between forward and backward are an error, as elsewhere.
TEST(SharedKeyHeads, AreNotWrittenBeforeBackward) {
  for (const bool writes_weight : {false, true}) {
    auto block = seeded({.key_heads = 2})->blocks[0];
    parallelize(*block, tensor_mesh(), {{"[kv]", KeyHeads{2}}});
    const auto x = from_local(torch::ones({kRows, kTime, kWidth}), tensor_mesh(), {Replicate{}}).requires_grad_() * 1;
    const auto loss = block->k(x).square().sum();
    {
      const torch::NoGradGuard no_grad;
      (writes_weight ? block->k->weight : x).add_(1);
    }
    EXPECT_THROWS_WITH(loss.backward(), "modified by an inplace operation");
  }
}

/// The gradient of a gradient.
TEST(SharedKeyHeads, AreDifferentiableTwice) {
  const NetOptions options{.key_heads = 2, .mixing = Mixing::kByHand};
  auto twin = seeded(options)->blocks[0], block = seeded(options)->blocks[0];
  parallelize(*block, tensor_mesh(), {{"k", KeyHeads{2}}});
  torch::manual_seed(9);
  const auto x = torch::randn({kRows, kTime, kWidth});
  std::vector<Tensor> gradients;
  for (auto* each : {&twin, &block}) {
    auto& module = **each;
    const auto loss = module.k(x).pow(3).sum();
    const auto first = torch::autograd::grad({loss}, {module.k->weight}, {}, true, /*create_graph=*/true)[0];
    first.square().sum().backward();
    gradients.push_back(whole_of(module.k->weight.grad()));
  }
  EXPECT_TENSORS_CLOSE(gradients[1], gradients[0], 1e-4, 1e-3);
}

} // namespace
} // namespace tessera::testing::shared_key_heads_test
