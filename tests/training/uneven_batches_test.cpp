// Ranks with different numbers of batches end together, and train as one process on the union of the batches.
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/collectives/counters.h>
#include <tessera/fsdp/model/sharded_module.h>
#include <tessera/fsdp/no_sync.h>
#include <tessera/nn/sync_batch_norm.h>
#include <tessera/training/uneven_batches.h>

#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>

namespace tessera::testing::uneven_batches_test {
namespace {

using torch::Tensor;
using Batches = std::vector<Tensor>;

/// Rank r has 1 + r batches.
Batches batches_of(int64_t rank, int64_t fewest = 1) {
  Batches batches;
  for (int64_t i = 0; i < fewest + rank; ++i) {
    auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(100 * rank + i));
    batches.push_back(torch::randint(0, 61, {2, 5}, generator, torch::kLong));
  }
  return batches;
}

/// One process: the losses of the ranks that have a batch, added and divided.
void train_union(Net& net, torch::optim::Optimizer& optimizer, UnevenDivisor divisor, int64_t fewest = 1) {
  for (size_t step = 0; step < static_cast<size_t>(fewest + world_size() - 1); ++step) {
    std::vector<Tensor> losses;
    for (int64_t rank = 0; rank < world_size(); ++rank) {
      const auto batches = batches_of(rank, fewest);
      if (step < batches.size()) losses.push_back(loss_of(net, batches[step]));
    }
    const auto divided =
        divisor == UnevenDivisor::kAllRanks ? static_cast<double>(world_size()) : static_cast<double>(losses.size());
    optimizer.zero_grad();
    (torch::stack(losses).sum() / divided).backward();
    optimizer.step();
  }
}

TEST(UnevenBatches, TrainAsOneProcessOnTheUnionOfTheBatches) {
  for (const auto divisor : {UnevenDivisor::kAllRanks, UnevenDivisor::kRanksWithInput}) {
    for (const auto& strategy : sweep(strategies(), 6, is_default)) {
      SCOPED_TRACE(strategy.name);
      Net net = make_net(), plain = make_net();
      shard_model(net, strategy);
      torch::optim::SGD ours(net->parameters(), 0.1), theirs(plain->parameters(), 0.1);
      auto mine = batches_of(world_rank());
      UnevenBatches batches(*net, mine, {.divisor = divisor});
      int64_t steps = 0, own = 0;
      for (auto& batch : batches) {
        EXPECT_EQ(batches.ranks_with_input(), world_size() - steps);
        EXPECT_EQ(batches.has_input(), steps < world_rank() + 1);
        own += batches.has_input() ? 1 : 0;
        ours.zero_grad();
        loss_of(net, batch).backward();
        ours.step();
        ++steps;
      }
      EXPECT_EQ(steps, world_size());
      EXPECT_EQ(own, world_rank() + 1);
      train_union(plain, theirs, divisor);
      EXPECT_LE(parameter_difference(*net, *plain), 1e-5);
      loss_of(net, mine[0]).backward(); // afterwards every rank counts again
      ours.zero_grad();
    }
  }
}

/// A rank without any batch, and what it stands in for it is not a number.
TEST(UnevenBatches, DropWhatAStandInBrings) {
  struct ScaledImpl : torch::nn::Module {
    Tensor forward(const Tensor& x) {
      const bool stands_in = !torch::isfinite(x).all().item<bool>();
      return linear(x).square().sum() * (stands_in ? unused.sum() : torch::ones({}, x.device()));
    }
    torch::nn::Linear linear{register_module("linear", torch::nn::Linear(3, 4))};
    Tensor unused = register_parameter("unused", torch::ones({5}));
  };
  for (const bool accumulates : {false, true}) {
    torch::manual_seed(0);
    const auto model = std::make_shared<ScaledImpl>(), plain = std::make_shared<ScaledImpl>();
    fully_shard(*model, world_mesh(), {.initial_weights = InitialWeights::kBroadcast});
    const torch::NoGradGuard no_grad;
    for (const auto& item : model->named_parameters()) plain->named_parameters()[item.key()].copy_(full(item.value()));
    const torch::AutoGradMode grad(true);
    Batches mine(static_cast<size_t>(world_rank() == last_rank() ? 2 : 0), torch::ones({2, 3}, test_device()));
    const auto nan = torch::full({2, 3}, std::numeric_limits<float>::quiet_NaN(), test_device());
    UnevenBatches batches(*model, mine, {.divisor = UnevenDivisor::kRanksWithInput, .stand_in = nan});
    int step = 0;
    for (auto& batch : batches) {
      std::optional<NoSync> scope;
      if (accumulates && step++ == 0) scope.emplace(*model);
      model->forward(batch).backward();
      plain->forward(torch::ones({2, 3})).backward();
    }
    EXPECT_TENSORS_CLOSE(full(model->linear->weight.grad()), plain->linear->weight.grad(), 1e-4, 1e-5);
    EXPECT_FALSE(model->unused.grad().defined()) << "no rank with input used it";
  }
}

/// Experts of which each rank has its own: nothing is reduced there.
TEST(UnevenBatches, DropWhatAStandInAccumulatesInAGroupOfOneRank) {
  struct WithExpertImpl : torch::nn::Module {
    Tensor forward(const Tensor& x) { return expert(linear(x)).square().sum(); }
    torch::nn::Linear linear{register_module("linear", torch::nn::Linear(3, 4))};
    torch::nn::Linear expert{register_module("expert", torch::nn::Linear(4, 2))};
  };
  torch::manual_seed(0);
  const auto model = std::make_shared<WithExpertImpl>();
  const auto grid = init_device_mesh(mesh_device_type, {1, world_size()}, {"shard", "expert"});
  fully_shard(*model->expert, grid["shard"]);
  fully_shard(*model, world_mesh());
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  Batches mine(static_cast<size_t>(world_rank() == 0 ? 4 : 2), torch::ones({2, 3}, test_device()));
  int step = 0;
  for (auto& batch : UnevenBatches(*model, mine)) {
    const auto before = full(model->expert->weight);
    const bool synchronizes = step++ % 2 == 1;
    {
      std::optional<NoSync> scope;
      if (!synchronizes) scope.emplace(*model);
      model->forward(batch).backward();
    }
    if (!synchronizes) continue;
    optimizer.step();
    optimizer.zero_grad();
    const bool has_input = step <= 2 || world_rank() == 0;
    EXPECT_EQ(torch::equal(full(model->expert->weight), before), !has_input);
  }
}

/// The root's weight fits no gradient that is divided by the ranks of an expert's own mesh.
TEST(UnevenBatches, DivideAnExpertByTheRanksWithInputWhereItsFactorIsAllRanks) {
  const auto make = [] {
    torch::manual_seed(0);
    return torch::nn::Sequential(torch::nn::Linear(3, 4), torch::nn::Linear(4, 2));
  };
  auto net = make(), plain = make();
  const auto grid = init_device_mesh(mesh_device_type, {1, world_size()}, {"shard", "expert"}); // one expert a rank
  auto expert = fully_shard(*(*net)[1], grid["shard"]);
  fully_shard(net, world_mesh());
  Batches mine(static_cast<size_t>(1 + world_rank()),
               torch::full({2, 3}, 1.0 + static_cast<double>(world_rank()), test_device()));
  UnevenBatches batches(*net, mine, {.divisor = UnevenDivisor::kRanksWithInput});
  if (world_size() > 1) {
    EXPECT_THROWS_WITH(batches.begin(), "divide others by another number, here those of 1");
    EXPECT_THROWS_WITH(batches.begin(), c10::str(" by 1: call set_gradient_divide_factor(", world_size(), ")"));
  }
  expert.set_gradient_divide_factor(static_cast<double>(world_size()));
  for (auto& batch : batches) {
    net->zero_grad();
    net->forward(batch).square().sum().backward();
    plain->zero_grad();
    if (batches.has_input()) (plain->forward(batch.cpu()).square().sum() / batches.ranks_with_input()).backward();
    const auto got = (*net)[1]->as<torch::nn::Linear>()->weight.grad(), own = (*plain)[1]->as<torch::nn::Linear>()->weight.grad();
    ASSERT_EQ(got.defined(), own.defined());
    if (own.defined()) EXPECT_TENSORS_CLOSE(full(got), own, 1e-4, 1e-5);
  }
}

/// One rank of many has input: its gradients in fp16, times the number of ranks, may be too large for that.
TEST(UnevenBatches, WeighGradientsInTheDtypeOfTheirReduction) {
  torch::nn::Linear linear(torch::nn::LinearOptions(3, 2).bias(false));
  FullyShardOptions options;
  options.initial_weights = InitialWeights::kBroadcast;
  options.mixed_precision = {.param_dtype = torch::kHalf, .reduce_dtype = torch::kFloat};
  fully_shard(linear, world_mesh(), options);
  Batches mine(static_cast<size_t>(world_rank() == 0 ? 2 : 1), torch::ones({1, 3}, test_device()));
  for (auto& batch : UnevenBatches(*linear, mine, {.divisor = UnevenDivisor::kRanksWithInput})) {
    linear->zero_grad();
    (linear(batch) * 60000).sum().backward();
  }
  EXPECT_TENSORS_CLOSE(full(linear->weight.grad()), torch::full({2, 3}, 60000.0), 1e-3, 1e-3);
}

TEST(UnevenBatches, CostAnAllReduceAStep) {
  if (world_size() == 1) return;
  torch::nn::Linear linear(3, 2);
  fully_shard(linear, world_mesh(), {.initial_weights = InitialWeights::kBroadcast});
  Batches mine(static_cast<size_t>(2 + world_rank()));
  UnevenBatches batches(*linear, mine);
  process_context().reset_counters();
  int64_t steps = 0;
  for (auto& batch : batches) steps += batch.defined() ? 0 : 1;
  EXPECT_EQ(steps, 1 + world_size());
  EXPECT_EQ(process_context().count(CollectiveKind::kAllReduce).calls, steps + 1);
}

TEST(UnevenBatches, WithAnEmptyStandInASynchronizedNormSeesTheRowsThatThereAre) {
  const auto make = [] {
    torch::manual_seed(0);
    return torch::nn::Sequential(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4), torch::nn::Linear(4, 2));
  };
  auto net = make(), plain = make();
  fully_shard(net, world_mesh());
  convert_sync_batch_norm(*net, world_mesh());
  const auto rows = [](int64_t rank, int64_t step) {
    auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(10 * rank + step));
    return torch::randn({3, 3}, generator, torch::kFloat);
  };
  Batches mine;
  for (int64_t step = 0; step <= world_rank(); ++step) mine.push_back(rows(world_rank(), step).to(test_device()));
  UnevenBatches batches(*net, mine, {.divisor = UnevenDivisor::kRanksWithInput, .stand_in = torch::empty({0, 3}, test_device())});
  int64_t step = 0;
  for (auto& batch : batches) {
    Batches all;
    for (int64_t rank = step; rank < world_size(); ++rank) all.push_back(rows(rank, step));
    net->zero_grad();
    plain->zero_grad();
    net->forward(batch).square().mean().backward();
    plain->forward(torch::cat(all)).square().mean().backward();
    const auto expected = plain->named_parameters();
    for (const auto& item : net->named_parameters())
      EXPECT_TENSORS_CLOSE(full(item.value().grad()), expected[item.key()].grad(), 1e-4, 1e-6);
    ++step;
  }
  EXPECT_TENSORS_CLOSE(net->named_buffers()["1.running_var"], plain->named_buffers()["1.running_var"], 1e-5, 1e-6);
}

TEST(UnevenBatches, OfAnUnshardedModelAreAPlainLoop) {
  torch::nn::Linear linear(3, 2);
  Batches mine(static_cast<size_t>(1 + world_rank()), torch::ones({1, 3}));
  UnevenBatches batches(*linear, mine);
  for (int epoch = 0; epoch < 2; ++epoch) {
    size_t steps = 0;
    for (auto& batch : batches) steps += static_cast<size_t>(batch.size(0));
    EXPECT_EQ(steps, mine.size());
  }
}

TEST(UnevenBatches, ALoopThatIsLeftEarlyDropsNothingAfterIt) {
  torch::nn::Linear linear(3, 2);
  fully_shard(linear, world_mesh(), {.initial_weights = InitialWeights::kBroadcast});
  Batches mine(static_cast<size_t>(1 + world_rank()), torch::ones({1, 3}, test_device()));
  UnevenBatches batches(*linear, mine);
  int rounds = 0;
  for (auto& batch : batches) {
    linear(batch).sum().backward();
    if (++rounds == 2) break; // when rank 0 was out
  }
  linear->zero_grad();
  linear(torch::ones({1, 3}, test_device())).sum().backward();
  EXPECT_TENSORS_CLOSE(full(linear->weight.grad()), torch::ones({2, 3}));
}

/// As an evaluation amid a training loop, over batches that every rank has; and one that was only made.
TEST(UnevenBatches, ALoopInsideOfAnotherLeavesItsWeights) {
  torch::nn::Linear linear(torch::nn::LinearOptions(3, 2).bias(false));
  fully_shard(linear, world_mesh(), {.initial_weights = InitialWeights::kBroadcast});
  Batches mine(static_cast<size_t>(1 + world_rank()), torch::ones({1, 3}, test_device()));
  Batches held_out(2, torch::ones({1, 3}, test_device()));
  UnevenBatches batches(*linear, mine, {.divisor = UnevenDivisor::kRanksWithInput});
  for (auto& batch : batches) {
    { const UnevenBatches unused(*linear, held_out); }
    for (auto& each : UnevenBatches(*linear, held_out)) {
      const torch::NoGradGuard no_grad;
      linear(each);
    }
    UnevenBatches left_early(*linear, held_out);
    for ([[maybe_unused]] auto& each : left_early) break;
    linear->zero_grad();
    linear(batch * (batches.has_input() ? 1 : 100)).sum().backward();
    EXPECT_TENSORS_CLOSE(full(linear->weight.grad()), torch::ones({2, 3}));
  }
}

TEST(UnevenBatches, LoopsThatOverlapLeaveNoWeight) {
  torch::nn::Linear linear(torch::nn::LinearOptions(3, 2).bias(false));
  fully_shard(linear, world_mesh(), {.initial_weights = InitialWeights::kBroadcast});
  Batches mine(world_rank() == 0 ? 0 : 1, torch::ones({1, 3})), others(2, torch::ones({1, 3}));
  UnevenBatches<Batches> one(*linear, mine, {.stand_in = torch::ones({1, 3})}), two(*linear, others);
  {
    auto a = one.begin();
    auto b = two.begin();
    while (!(a == one.end()) && !(b == two.end())) ++a, ++b; // the first one ends first
  }
  linear(torch::ones({1, 3}, test_device())).sum().backward();
  EXPECT_TENSORS_CLOSE(full(linear->weight.grad()), torch::ones({2, 3}));
}

TEST(UnevenBatches, HoldForAModelThatTakesTheirsUp) {
  const auto make = [] {
    torch::manual_seed(0);
    return torch::nn::Sequential(torch::nn::Linear(3, 4), torch::nn::Linear(4, 2));
  };
  auto net = make(), plain = make();
  auto block = fully_shard(*net->ptr(0), world_mesh());
  Batches mine(world_rank() == last_rank() ? 1 : 0, torch::ones({2, 3}, test_device()));
  const auto stand_in = torch::full({2, 3}, 7, test_device()).to(torch::kFloat);
  UnevenBatches batches(*net->ptr(0), mine, {.divisor = UnevenDivisor::kRanksWithInput, .stand_in = stand_in});
  for (auto& batch : batches) {
    block.set_is_last_backward(false);
    fully_shard(net, world_mesh());
    EXPECT_FALSE(block.state()->schedule()->is_last_backward());
    block.set_is_last_backward(true);
    net->forward(batch).square().sum().backward();
  }
  plain->forward(torch::ones({2, 3})).square().sum().backward();
  const auto expected = plain->named_parameters();
  for (const auto& item : net->named_parameters())
    EXPECT_TENSORS_CLOSE(full(item.value().grad()), expected[item.key()].grad(), 1e-4, 1e-5) << item.key();
}

TEST(UnevenBatches, TakeTheModuleThatWasSharded) {
  torch::nn::Sequential net(torch::nn::Linear(3, 3), torch::nn::Linear(3, 3));
  fully_shard(*net[0], world_mesh(), {.initial_weights = InitialWeights::kBroadcast});
  Batches mine(2, torch::ones({1, 3}));
  EXPECT_THROWS_WITH(UnevenBatches(*net, mine), "is not sharded itself, but modules below it are");
}

/// Its weight would not reach the gradients of the other model.
TEST(UnevenBatches, RefuseAModelThatSharesAModuleWithAnother) {
  torch::nn::Linear encoder(3, 3);
  torch::nn::Sequential one(encoder, torch::nn::Linear(3, 2)), two(encoder, torch::nn::Linear(3, 2));
  for (const auto& net : {one, two}) fully_shard(net, world_mesh(), {.initial_weights = InitialWeights::kBroadcast});
  Batches mine(2, torch::ones({1, 3}));
  const UnevenBatches whole(*one, mine);
  EXPECT_THROWS_WITH(UnevenBatches(*two, mine), "which is another model and does not reach it");
  for (auto& parameter : encoder->parameters()) parameter.requires_grad_(false); // which have no gradients
  const UnevenBatches trained(*two, mine);
}

TEST(UnevenBatches, ARankWithoutAnyBatchNeedsAStandIn) {
  torch::nn::Linear linear(3, 2);
  fully_shard(linear, world_mesh(), {.initial_weights = InitialWeights::kBroadcast});
  Batches none, some(2, torch::ones({1, 3}));
  UnevenBatches nothing(*linear, none);
  for ([[maybe_unused]] auto& batch : nothing) FAIL() << "no rank has a batch";
  if (world_size() == 1) return;
  UnevenBatches batches(*linear, world_rank() == 0 ? none : some);
  EXPECT_THROWS_WITH(batches.begin(), "UnevenBatches: 1 of");
}

} // namespace
} // namespace tessera::testing::uneven_batches_test
