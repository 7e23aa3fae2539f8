// Parameters that every rank has whole, beside those of the same call that are sharded: Replicate from shard_placement_fn.
#include <gtest/gtest.h>

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/fsdp/clip_grad.h>
#include <tessera/fsdp/communication.h>
#include <tessera/fsdp/meta_init.h>
#include <tessera/fsdp/model/sharded_module.h>
#include <tessera/fsdp/no_sync.h>
#include <tessera/fsdp/reshard_parameters.h>
#include <tessera/fsdp/summary.h>
#include <tessera/fsdp/unsharded.h>

#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::whole_parameters_test {
namespace {

using torch::Tensor;

bool is_small(const Tensor& parameter) { return parameter.dim() <= 1; }

ChosenPlacement small_ones_whole(const std::string&, const Tensor& parameter) {
  return is_small(parameter) ? std::optional<Placement>(Replicate{}) : std::nullopt;
}

ChosenPlacement all_whole(const std::string&, const Tensor&) { return Replicate{}; }

/// Beside some that are placed.
ChosenPlacement small_ones_whole_and_columns(const std::string&, const Tensor& parameter) {
  return is_small(parameter) ? Placement(Replicate{}) : Placement(Shard{parameter.dim() - 1});
}

std::vector<std::pair<std::string, ShardPlacementFn>> choices() {
  return {{"small ones", small_ones_whole}, {"all", all_whole}, {"beside columns", small_ones_whole_and_columns}};
}

Strategy with(Strategy strategy, const ShardPlacementFn& placements) {
  strategy.options.shard_placement_fn = placements;
  return strategy;
}

Net sharded(const Strategy& strategy, const ShardPlacementFn& placements = small_ones_whole) {
  Net net = make_net();
  shard_model(net, with(strategy, placements));
  return net;
}

std::vector<Strategy> sharding_strategies() {
  auto all = strategies();
  std::erase_if(all, [](const auto& each) { return each.replicates; });
  return all;
}

/// The largest difference between this rank's values and the mean over all ranks.
void expect_same_on_all_ranks(const Tensor& local) {
  const auto mesh = world_mesh();
  auto largest = local.detach().clone(), smallest = local.detach().clone();
  mesh.communicator()->all_reduce(largest, ReduceOp::kMax, "largest").wait();
  mesh.communicator()->all_reduce(smallest, ReduceOp::kMin, "smallest").wait();
  EXPECT_TENSORS_EQUAL(largest, smallest);
}

/// A model in training, and the same one unsharded.
struct Training {
  explicit Training(Net model) : net(std::move(model)) {}
  Tensor step(const Tensor& batch) {
    optimizer.zero_grad();
    const auto loss = loss_of(net, batch);
    loss.backward();
    norm = clip_grad_norm_(*net, 0.5).item<double>();
    optimizer.step();
    return loss.detach();
  }
  StateDict state() { return state_dict(*net, optimizer); }
  Net net;
  torch::optim::AdamW optimizer{net->parameters(), torch::optim::AdamWOptions(1e-2)};
  double norm = 0;
};

void step(Training& sharded, Training& plain, int64_t number) {
  const auto loss = mean_over_ranks(sharded.step(own_batch(number)));
  EXPECT_NEAR(loss.item<double>(), plain.step(global_batch(number)).item<double>(), 1e-5);
  EXPECT_NEAR(sharded.norm, plain.norm, 1e-5);
}

TEST(WholeParameters, TrainAsTheUnshardedModel) {
  for (const auto& [name, choose] : choices()) {
    for (const auto& strategy : sharding_strategies()) {
      SCOPED_TRACE(name + ", " + strategy.name);
      Training ours(sharded(strategy, choose)), plain(make_net());
      for (int64_t number = 0; number < 3; ++number) step(ours, plain, number);
      EXPECT_LE(parameter_difference(*ours.net, *plain.net), 2e-4); // Adam magnifies what rounds a small gradient
      const torch::NoGradGuard no_grad;
      EXPECT_TENSORS_CLOSE(loss_of(ours.net, global_batch(9)).cpu(), loss_of(plain.net, global_batch(9)), 1e-4, 1e-4);
    }
  }
}

TEST(WholeParameters, AreTheSameOnAllRanksToTheBit) {
  for (const auto& strategy : sharding_strategies()) {
    SCOPED_TRACE(strategy.name);
    Training ours(sharded(strategy));
    for (int64_t number = 0; number < 2; ++number) ours.step(own_batch(number));
    for (const auto& parameter : ours.net->parameters()) {
      if (!is_small(parameter)) continue;
      const auto& placements = DTensor(parameter).placements();
      EXPECT_TRUE(std::all_of(placements.begin(), placements.end(), is_replicate)) << to_string(placements);
      EXPECT_EQ(DTensor(parameter).local().numel(), parameter.numel());
      expect_same_on_all_ranks(DTensor(parameter).local());
    }
  }
}

TEST(WholeParameters, OfACallTakeOneAllReduce) {
  if (world_size() == 1) GTEST_SKIP() << "nothing is sent";
  auto net = make_net();
  fully_shard(*net->blocks[0], world_mesh(), {.shard_placement_fn = small_ones_whole});
  auto& block = *net->blocks[0]->as<Block>();
  process_context().reset_counters();
  block.forward(torch::ones({2, 18}, test_device())).sum().backward();
  EXPECT_EQ(process_context().count(CollectiveKind::kAllGather).calls, 1); // a root stays gathered for its backward
  EXPECT_EQ(process_context().count(CollectiveKind::kReduceScatter).calls, 1);
  EXPECT_EQ(process_context().count(CollectiveKind::kAllReduce).calls, 1);
  const auto groups = summary(*net->blocks[0]).groups;
  ASSERT_EQ(groups.size(), 2U);
  EXPECT_EQ(groups[0].strategy, "no-shard"); // of the norm, which comes first
  EXPECT_EQ(groups[0].unsharded_bytes, 0);   // the shard itself
  EXPECT_EQ(groups[1].strategy, "full");
}

/// They are one group for the step: a rank that uses others of its parameters calls the same collectives.
TEST(WholeParameters, RanksMayUseOthersOfACall) {
  for (const auto& strategy : sharding_strategies()) {
    SCOPED_TRACE(strategy.name);
    torch::manual_seed(2);
    Block block(6), plain(6);
    for (const auto& item : plain->named_parameters()) item.value().data().copy_(block->named_parameters()[item.key()]);
    auto options = strategy.options;
    options.shard_placement_fn = small_ones_whole;
    fully_shard(*block, strategy.mesh(), options);
    const auto x = torch::ones({2, 6}) + torch::arange(6);
    const auto loss = [&](Block& of, int64_t rank) {
      const auto on = x.to(of->up->weight.device());
      return rank % 2 == 0 ? of->norm(on).square().sum() : torch::linear(on, of->up->weight).square().sum();
    };
    for (int64_t pass = 0; pass < 2; ++pass) {
      loss(block, world_rank()).backward();
      for (int64_t rank = 0; rank < world_size(); ++rank) (loss(plain, rank) / world_size()).backward();
    }
    for (const auto& item : block->named_parameters()) {
      const auto expected = plain->named_parameters()[item.key()].grad();
      ASSERT_EQ(item.value().grad().defined(), expected.defined()) << item.key();
      if (expected.defined()) EXPECT_TENSORS_CLOSE(full(item.value().grad()), expected, 1e-4, 1e-4);
    }
  }
}

TEST(WholeParameters, AccumulateWithAndWithoutCommunication) {
  for (const auto& strategy : sharding_strategies()) {
    SCOPED_TRACE(strategy.name);
    Net net = sharded(strategy), plain = make_net();
    auto root = fsdp(*net);
    {
      const auto scope = no_sync(*net);
      loss_of(net, own_batch(0)).backward();
    }
    root.set_requires_all_reduce(false);
    loss_of(net, own_batch(1)).backward();
    root.set_requires_all_reduce(true);
    root.set_is_last_backward(false);
    loss_of(net, own_batch(2)).backward();
    root.set_is_last_backward(true);
    loss_of(net, own_batch(3)).backward();
    for (int64_t number = 0; number < 4; ++number) loss_of(plain, global_batch(number)).backward();
    const auto expected = plain->named_parameters();
    for (const auto& item : net->named_parameters()) {
      SCOPED_TRACE(item.key());
      EXPECT_TENSORS_CLOSE(full(item.value().grad()), expected[item.key()].grad(), 1e-4, 1e-5);
    }
  }
}

TEST(WholeParameters, AreSavedAndLoadedAsAllOthers) {
  const auto all = sharding_strategies();
  for (size_t i = 0; i < all.size(); ++i) {
    const auto& other = all[(i + 3) % all.size()];
    SCOPED_TRACE(all[i].name + ", " + other.name);
    const SharedFolder folder;
    Training saved(sharded(all[i])), plain(make_net());
    for (int64_t number = 0; number < 2; ++number) step(saved, plain, number);
    checkpoint::save(saved.state(), folder.path() / "whole");
    Net split = make_net(7);
    shard_model(split, other);
    Training loaded(split);
    checkpoint::load(loaded.state(), folder.path() / "whole");
    step(loaded, plain, 2);
    checkpoint::save(loaded.state(), folder.path() / "split");
    Training back(sharded(all[i]));
    checkpoint::load(back.state(), folder.path() / "split");
    step(back, plain, 3);
    EXPECT_LE(parameter_difference(*back.net, *plain.net), 2e-4);
  }
}

TEST(WholeParameters, WithMixedPrecisionAndInFiles) {
  for (const bool offloads : {false, true}) {
    if (offloads && !tests_the_cpu()) continue; // the model's inputs would follow its weights to the host
    auto strategy = strategies()[0];
    strategy.options.mixed_precision = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat, .keep_in_fp32 = {"norm"}};
    if (offloads) strategy.options.offload = offload_to_files(std::filesystem::temp_directory_path());
    Training ours(sharded(strategy)), plain(make_net());
    for (int64_t number = 0; number < 3; ++number) {
      const auto loss = mean_over_ranks(ours.step(own_batch(number)));
      EXPECT_NEAR(loss.item<double>(), plain.step(global_batch(number)).item<double>(), 0.2); // bf16's steps are 0.125
    }
    for (const auto& parameter : ours.net->parameters()) EXPECT_EQ(parameter.scalar_type(), torch::kFloat);
  }
}

TEST(WholeParameters, ReceiveReductionsInFewerBits) {
  auto strategy = strategies()[0];
  strategy.options.communication.reduction = quantized_reduction({.smallest = 1});
  Training ours(sharded(strategy)), plain(make_net());
  for (int64_t number = 0; number < 2; ++number) {
    const auto loss = mean_over_ranks(ours.step(own_batch(number)));
    EXPECT_NEAR(loss.item<double>(), plain.step(global_batch(number)).item<double>(), 1e-2);
  }
  for (const auto& parameter : ours.net->parameters()) {
    if (is_small(parameter)) expect_same_on_all_ranks(DTensor(parameter).local());
  }
}

TEST(WholeParameters, AreMaterialized) {
  auto linear = on_meta([] { return torch::nn::Linear(6, 5); });
  fully_shard(linear, world_mesh(), {.shard_placement_fn = small_ones_whole});
  materialize(*linear, [](torch::nn::Module& module) {
    for (auto& parameter : module.parameters()) torch::nn::init::ones_(parameter);
  });
  EXPECT_TENSORS_EQUAL(linear->forward(torch::ones({1, 6}, test_device())).detach(), torch::full({1, 5}, 7.0));
  EXPECT_EQ(DTensor(linear->bias).local().numel(), 5);
}

TEST(WholeParameters, StayWholeWhereTheModelIsChanged) {
  for (const auto& strategy : sharding_strategies()) {
    SCOPED_TRACE(strategy.name);
    Net net = sharded(strategy), plain = make_net();
    fsdp(*net->blocks[1]).set_gradient_divide_factor(2.0);
    for (auto* const each : {&net, &plain}) {
      auto& block = *(*each)->blocks[1]->as<Block>();
      block.down = block.replace_module("down", torch::nn::Linear(torch::nn::LinearOptions(54, 18).bias(false)));
      torch::nn::init::constant_(block.down->weight, .01);
    }
    reshard_parameters(*net);
    reshard_parameters(*net, {.dtype = torch::kDouble});
    plain->to(torch::kDouble);
    EXPECT_EQ(DTensor(net->blocks[1]->as<Block>()->norm->weight).local().numel(), 18);
    loss_of(net, own_batch(0)).backward();
    loss_of(plain, global_batch(0)).backward();
    const auto expected = plain->named_parameters();
    for (const auto& item : net->named_parameters()) {
      SCOPED_TRACE(item.key());
      const double factor = item.key().starts_with("blocks.1.") ? world_size() / 2.0 : 1.0;
      EXPECT_TENSORS_CLOSE(full(item.value().grad()), expected[item.key()].grad() * factor, 1e-4, 1e-6);
    }
  }
}

TEST(WholeParameters, AreReadAndWritten) {
  torch::manual_seed(0);
  torch::nn::Linear linear(6, 5);
  const auto bias = linear->bias.detach().clone();
  fully_shard(linear, world_mesh(), {.shard_placement_fn = small_ones_whole});
  EXPECT_TENSORS_EQUAL(full(linear->bias), bias);
  auto handle = fsdp(*linear);
  handle.unshard();
  EXPECT_TENSORS_EQUAL(unsharded(linear->bias).detach(), bias);
  handle.reshard();
  {
    const torch::NoGradGuard no_grad;
    linear->bias.mul_(2);
    linear->weight.zero_();
  }
  EXPECT_TENSORS_EQUAL(linear->forward(torch::ones({1, 6}, test_device())).detach().cpu(), (bias * 2).unsqueeze(0));
}

/// Sends shards as they are.
struct Plain final : GatherExtension {
  Sent before(const Tensor& shard, const DeviceMesh&) override { return {{shard}}; }
  Tensor after(const std::vector<std::vector<Tensor>>& gathered, const std::any&, const Tensor& out) override {
    int64_t row = 0;
    for (const auto& each : gathered) {
      out.narrow(0, row, each[0].size(0)).copy_(each[0]);
      row += each[0].size(0);
    }
    return out;
  }
};

TEST(WholeParameters, StandBesideGatherExtensions) {
  torch::manual_seed(0);
  torch::nn::Linear linear(6, 5);
  const auto whole = linear->forward(torch::ones({1, 6})).detach();
  FullyShardOptions options{.shard_placement_fn = small_ones_whole};
  options.gather_extension_fn = [](const std::string&, const Tensor&) { return std::make_shared<Plain>(); };
  EXPECT_THROWS_WITH(fully_shard(linear, world_mesh(), options),
                     "the parameter bias is Replicate, so that nothing is gathered of it, but gather_extension_fn gave it an");
  options.gather_extension_fn = [](const std::string& name, const Tensor&) {
    return name == "weight" ? std::make_shared<Plain>() : nullptr;
  };
  fully_shard(linear, world_mesh(), options);
  EXPECT_TENSORS_CLOSE(linear->forward(torch::ones({1, 6}, test_device())).detach().cpu(), whole, 1e-6, 1e-6);
}

TEST(WholeParameters, AreAsOthersWhereNothingIsSharded) {
  torch::manual_seed(0);
  torch::nn::Linear linear(6, 5);
  replicate(linear, world_mesh(), {.shard_placement_fn = all_whole});
  EXPECT_EQ(fsdp(*linear).state()->groups().size(), 1U);
  EXPECT_EQ(DTensor(linear->weight).local().numel(), 30);
}

} // namespace
} // namespace tessera::testing::whole_parameters_test
