#include <c10/core/AutogradState.h>
#include <gtest/gtest.h>

#include <map>

#include <tessera/collectives/process_context.h>
#include <tessera/fsdp/call.h>
#include <tessera/fsdp/model/sharded_module.h>

#include <tessera/tests/fsdp/twin.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::training_test {
namespace {

const Steps kSteps{.clip = [](Net& net) { torch::nn::utils::clip_grad_norm_(net->parameters(), 0.5); }}; // LibTorch's own

TEST(Training, EveryStrategyMatchesTheUnshardedModel) {
  Net plain = make_net();
  const auto expected = train(plain, kSteps);
  EXPECT_LT(expected.back(), expected.front());
  for (const auto& strategy : strategies()) {
    for (const bool optimizer_first : {true, false}) {
      SCOPED_TRACE(strategy.name + (optimizer_first ? ", optimizer built before" : ", optimizer built after"));
      Net net = make_net();
      std::unique_ptr<torch::optim::AdamW> optimizer;
      const auto make_optimizer = [&] {
        optimizer = std::make_unique<torch::optim::AdamW>(net->parameters(), torch::optim::AdamWOptions(1e-2));
      };
      if (optimizer_first) make_optimizer();
      shard_model(net, strategy);
      if (!optimizer_first) make_optimizer();
      expect_equal_losses(train(net, *optimizer, kSteps), expected);
      EXPECT_LT(parameter_difference(*net, *plain), kSumTolerance);
    }
  }
}

TEST(Training, EvaluationUnderNoGradReadsTheShardedParameters) {
  Net plain = make_net(), net = make_net();
  for (const auto& strategy : strategies()) {
    Net sharded = make_net();
    shard_model(sharded, strategy);
    const torch::NoGradGuard no_grad;
    for (int pass = 0; pass < 2; ++pass) {
      EXPECT_NEAR(loss_of(sharded, global_batch(0)).item<double>(), loss_of(plain, global_batch(0)).item<double>(), kSumTolerance)
          << strategy.name;
    }
  }
}

TEST(Training, EvaluationBeforeAndBetweenStepsChangesNothing) {
  const auto evaluate = [](Net& net, int64_t step) {
    const torch::NoGradGuard no_grad;
    if (is_sharded(*net)) loss_of(net, global_batch(100 + step));
  };
  const Steps evaluating{.count = 4, .clip = kSteps.clip, .before = evaluate};
  Net plain = make_net();
  const auto expected = train(plain, evaluating);
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Net net = make_net();
    shard_model(net, strategy);
    expect_equal_losses(train(net, evaluating), expected);
    EXPECT_LT(parameter_difference(*net, *plain), kSumTolerance);
  }
}

struct Counts {
  int64_t all_gathers, reduce_scatters, all_reduces;
  bool operator==(const Counts&) const = default;
};

Counts counts() {
  auto& context = process_context();
  return {context.count(CollectiveKind::kAllGather).calls, context.count(CollectiveKind::kReduceScatter).calls,
          context.count(CollectiveKind::kAllReduce).calls};
}

int64_t groups_of(const Strategy& strategy) {
  Net net = make_net();
  shard_model(net, strategy);
  return static_cast<int64_t>(fsdp(*net).state()->subtree_groups().size());
}

Counts counts_of_a_step(const Strategy& strategy) {
  Net net = make_net();
  shard_model(net, strategy);
  for (int64_t step = 0; step < 2; ++step) loss_of(net, own_batch(step)).backward();
  process_context().reset_counters();
  loss_of(net, own_batch(2)).backward();
  return counts();
}

TEST(Training, AStepCostsTheExpectedCollectives) {
  const bool alone = world_size() == 1;
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    const auto mesh = strategy.mesh();
    const bool hierarchical = strategy.options.strategy == tessera::Strategy::kHierarchical;
    const bool zero = strategy.options.strategy && !hierarchical;
    const bool shards = !strategy.replicates && mesh.size(mesh.ndim() - 1) > 1;
    const bool outer = strategy.replicates ? !alone : mesh.ndim() == 2 && mesh.size(0) > 1;
    const int64_t groups = groups_of(strategy); // three blocks and the root, or their buckets
    const bool kept = strategy.options.reshard_after_forward == ReshardAfterForward(false);
    // Two each, but the root and the last block stay unsharded from forward into backward. No step has written the weights: what
    // ZeRO-1 and 2, or the inner ranks of a hierarchical strategy, keep from before serves.
    const Counts expected{shards && !zero ? (kept ? groups : 2 * groups - 2) : 0,
                          (shards ? groups : 0) + (hierarchical && outer ? groups : 0), outer && !hierarchical ? groups : 0};
    const auto got = counts_of_a_step(strategy);
    EXPECT_EQ(got.all_gathers, expected.all_gathers);
    EXPECT_EQ(got.reduce_scatters, expected.reduce_scatters);
    EXPECT_EQ(got.all_reduces, expected.all_reduces);
  }
}

TEST(Training, ClippingCostsOneAllReduce) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Net plain = make_net(), net = make_net();
    shard_model(net, strategy);
    loss_of(plain, global_batch(0)).backward();
    loss_of(net, own_batch(0)).backward();
    process_context().reset_counters();
    const double norm = torch::nn::utils::clip_grad_norm_(net->parameters(), 0.1);
    EXPECT_NEAR(norm, torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.1), kSumTolerance);
    const auto mesh = strategy.mesh();
    const bool hierarchical = strategy.options.strategy == tessera::Strategy::kHierarchical;
    const bool shards = !strategy.replicates && (hierarchical ? mesh.size() : mesh.size(mesh.ndim() - 1)) > 1;
    EXPECT_EQ(counts().all_reduces, shards ? 1 : 0);
    EXPECT_EQ(counts().all_gathers, 0);
  }
}

TEST(Training, AccumulationWithoutSyncCommunicatesOnlyInTheLastBackward) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Net plain = make_net(), net = make_net();
    shard_model(net, strategy);
    auto root = fsdp(*net);
    process_context().reset_counters();
    for (int64_t micro = 0; micro < 3; ++micro) {
      root.set_requires_gradient_sync(micro == 2);
      (loss_of(plain, global_batch(micro)) / 3).backward();
      (loss_of(net, own_batch(micro)) / 3).backward();
      if (micro < 2) {
        EXPECT_EQ(counts().reduce_scatters + counts().all_reduces, 0);
      }
    }
    expect_equal_gradients(net, plain);
  }
}

TEST(Training, GradientsOfTwoBackwardsAddUp) {
  Net plain = make_net(), net = make_net();
  shard_model(net, strategies()[0]);
  for (int64_t step = 0; step < 2; ++step) {
    loss_of(plain, global_batch(step)).backward();
    loss_of(net, own_batch(step)).backward();
  }
  expect_equal_gradients(net, plain);
}

TEST(Training, ForwardStepForwardReadsTheNewParameters) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Net plain = make_net(), net = make_net();
    shard_model(net, strategy);
    loss_of(net, global_batch(0));
    const torch::NoGradGuard no_grad;
    for (auto& parameter : plain->parameters()) parameter.mul_(0.5);
    for (auto& parameter : net->parameters()) parameter.mul_(0.5);
    EXPECT_NEAR(loss_of(net, global_batch(0)).item<double>(), loss_of(plain, global_batch(0)).item<double>(), kSumTolerance);
  }
}

TEST(Training, AnExceptionInForwardOrBackwardLeavesTheModelUsable) {
  struct ThrowInBackward : torch::autograd::Function<ThrowInBackward> {
    static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& x) { return x.clone(); }
    static torch::autograd::tensor_list backward(torch::autograd::AutogradContext*, const torch::autograd::tensor_list&) {
      throw std::runtime_error("thrown in backward");
    }
  };
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Net plain = make_net(), net = make_net();
    shard_model(net, strategy);
    if (tests_the_cpu()) // other devices find it later, and end with it
      EXPECT_THROWS_WITH(net->forward(torch::full({2, 3}, 1000, torch::kLong)), "index out of range in self");
    fsdp(*net).set_requires_all_reduce(false); // what an HSDP rank keeps of this backward is dropped as well
    loss_of(net, own_batch(2)).backward();
    auto x = net->embedded(own_batch(0));
    x = (*net->blocks)[0]->as<Block>()->forward(x);
    x = ThrowInBackward::apply(x);
    for (size_t i = 1; i < net->blocks->size(); ++i) x = (*net->blocks)[i]->as<Block>()->forward(x);
    EXPECT_THROWS_WITH(x.sum().backward(), "thrown in backward");
    fsdp(*net).set_requires_all_reduce(true);
    net->zero_grad();
    loss_of(plain, global_batch(1)).backward();
    loss_of(net, own_batch(1)).backward();
    expect_equal_gradients(net, plain);
  }
}

TEST(Training, ReshardFreesAndUnshardGathers) {
  Net net = make_net();
  shard_model(net, strategies()[0]);
  auto block = fsdp(*(*net->blocks)[0]);
  EXPECT_EQ(block.unsharded_bytes(), 0);
  block.unshard();
  if (world_size() > 1) {
    EXPECT_GT(block.unsharded_bytes(), 0);
  }
  block.reshard();
  EXPECT_EQ(block.unsharded_bytes(), 0);
  loss_of(net, global_batch(0)).backward();
  for (auto& each : *net->blocks) EXPECT_EQ(fsdp(*each).unsharded_bytes(), 0);
  EXPECT_EQ(fsdp(*net).unsharded_bytes(), 0);
  {
    const torch::NoGradGuard no_grad;
    const auto scope = forward_scope(*net);
    loss_of(net, global_batch(0));
  }
  for (auto& each : *net->blocks) EXPECT_EQ(fsdp(*each).unsharded_bytes(), 0);
}

// What a group frees is the next one's memory, also where no two of them are of one size.
TEST(Training, AModelKeepsTheMemoryOfAFewGroups) {
  constexpr int64_t kLayers = 16;
  for (const auto& strategy : strategies()) {
    if (strategy.options.reshard_after_forward == ReshardAfterForward(false)) continue; // that one needs all at once
    if (strategy.options.strategy && strategy.options.strategy != tessera::Strategy::kHierarchical) continue;
    for (const int64_t growth : {0, 1}) {
      SCOPED_TRACE(strategy.name + (growth > 0 ? ", groups of unlike sizes" : ", groups of one size"));
      torch::manual_seed(0);
      torch::nn::Sequential net;
      for (int64_t i = 0; i < kLayers; ++i) net->push_back(torch::nn::Linear(20 + growth * i, 20 + growth * (i + 1)));
      std::vector<FSDPModule> layers;
      const auto shard = [&](torch::nn::Module& module) {
        return strategy.replicates ? replicate(module, strategy.mesh(), strategy.options)
                                   : fully_shard(module, strategy.mesh(), strategy.options);
      };
      for (auto& layer : *net) layers.push_back(shard(*layer.ptr()));
      shard(*net);
      for (int step = 0; step < 3; ++step) net->forward(torch::ones({2, 20}, test_device())).sum().backward();
      std::map<const void*, int64_t> cached;
      int64_t whole = 0;
      for (const auto& layer : layers) {
        auto& group = *layer.state()->group();
        cached[&group.cache()] = group.cache().cached_bytes();
        whole += group.layout().unsharded_bytes;
      }
      EXPECT_EQ(cached.size(), 1);
      EXPECT_LT(cached.begin()->second, whole / 2);
    }
  }
}

/// Computes a layer again in backward (activation checkpointing).
struct Recompute : torch::autograd::Function<Recompute> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& x, torch::nn::LinearImpl* layer) {
    context->save_for_backward({x});
    context->saved_data["layer"] = reinterpret_cast<int64_t>(layer);
    return layer->forward(x);
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context,
                                               torch::autograd::tensor_list gradients) {
    auto* layer = reinterpret_cast<torch::nn::LinearImpl*>(context->saved_data["layer"].toInt());
    const torch::AutoGradMode grad_mode(true);
    const auto x = context->get_saved_variables()[0].detach().requires_grad_();
    torch::autograd::backward({layer->forward(x)}, {gradients[0]});
    return {x.grad(), torch::Tensor()};
  }
};

// No parameter is read in the outer graph, so the first event of the backward is a recompute.
TEST(Training, EveryRecomputedLayerIsGatheredTwiceAStep) {
  constexpr int64_t kLayers = 6;
  torch::manual_seed(0);
  torch::nn::Sequential net;
  for (int64_t i = 0; i < kLayers; ++i) net->push_back(torch::nn::Linear(4, 4));
  for (auto& layer : *net) fully_shard(*layer.ptr(), world_mesh());
  fully_shard(*net, world_mesh());
  for (int step = 0; step < 3; ++step) {
    process_context().reset_counters();
    auto x = torch::ones({2, 4}, test_device()).requires_grad_();
    for (auto& layer : *net) x = Recompute::apply(x, layer.ptr()->as<torch::nn::LinearImpl>());
    x.sum().backward();
  }
  EXPECT_LE(process_context().count(CollectiveKind::kAllGather).calls, 2 * kLayers);
}

// Making a DTensor turns on autograd's view replay, which would make every view of an activation dearer.
TEST(Training, ViewsOfPlainTensorsAreNotReplayed) {
  const auto replays = [] { return c10::AutogradState::get_tls_state().get_view_replay_enabled(); };
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Net net = make_net();
    shard_model(net, strategy);
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      auto x = net->embedded(global_batch(step)); // the first to be computed, and the last to get its gradient
      EXPECT_FALSE(replays());
      bool replays_in_backward = true;
      x.register_hook([&](const torch::Tensor&) { replays_in_backward = replays(); });
      for (auto& block : *net->blocks) x = block->as<Block>()->forward(x);
      x.sum().backward();
      EXPECT_FALSE(replays_in_backward);
    }
    // Those of DTensors still are, which an in-place op on a view needs.
    const auto weight = (*net->blocks)[0]->as<Block>()->up->weight.detach().clone().requires_grad_();
    loss_of(net, global_batch(0));
    auto copy = weight * 1;
    copy.t().mul_(2);
    copy.sum().backward();
    EXPECT_TRUE(full(weight.grad()).eq(2).all().item<bool>());
  }
}

/// Layers in a row, each a group of its own.
struct ChainImpl : torch::nn::Module {
  ChainImpl() {
    torch::manual_seed(0);
    for (int i = 0; i < 4; ++i) layers->push_back(torch::nn::Linear(6, 6));
    register_module("layers", layers);
  }
  torch::Tensor forward(torch::Tensor x, int64_t bias_only) {
    for (int64_t i = 0; i < 4; ++i) {
      auto& layer = *layers[i]->as<torch::nn::Linear>();
      x = torch::tanh(i == bias_only ? x + layer.bias : layer.forward(x));
    }
    return x;
  }
  torch::nn::ModuleList layers;
};
TORCH_MODULE(Chain);

/// Two steps of the loss that each rank has, beside the mean of all of them.
void expect_steps_like_unsharded(const std::function<torch::Tensor(Chain&, int64_t rank)>& loss, int64_t prefetch_depth) {
  Chain plain, net;
  for (const auto& layer : *net->layers) fully_shard(*layer, world_mesh());
  fully_shard(*net, world_mesh()).set_prefetch_depth(prefetch_depth);
  torch::optim::SGD plain_optimizer(plain->parameters(), 0.1), optimizer(net->parameters(), 0.1);
  plain->to(world_mesh().device());
  for (int step = 0; step < 2; ++step) {
    for (int64_t rank = 0; rank < world_size(); ++rank) (loss(plain, rank) / world_size()).backward();
    loss(net, world_rank()).backward();
    plain_optimizer.step();
    optimizer.step();
    plain_optimizer.zero_grad();
    optimizer.zero_grad();
  }
  EXPECT_LT(parameter_difference(*net, *plain), kSumTolerance);
}

TEST(Training, RanksMayDifferInWhichGroupsTheirBackwardReads) {
  const auto x = torch::linspace(-1, 1, 12, torch::TensorOptions(world_mesh().device())).view({2, 6});
  const auto of_a_bias = [&](Chain& net, int64_t rank) { // one rank's backward needs no value of the second layer
    return net->forward(x * static_cast<double>(rank + 1), rank == 1 ? 1 : -1).square().mean();
  };
  const auto of_no_data = [&](Chain& net, int64_t rank) { // DDP's habit where a rank has no rows
    if (rank != 1) return net->forward(x, -1).square().mean();
    auto loss = torch::zeros({}, x.options());
    for (const auto& parameter : net->parameters()) loss = loss + 0 * parameter.sum();
    return loss;
  };
  const auto of_its_input = [&](Chain& net, int64_t rank) { // one rank's input requires a gradient
    return net->forward(x.detach().clone().requires_grad_(rank == 0), -1).square().mean();
  };
  for (const int64_t depth : {0, 1, 2}) {
    SCOPED_TRACE(depth);
    expect_steps_like_unsharded(of_a_bias, depth);
    expect_steps_like_unsharded(of_no_data, depth);
    expect_steps_like_unsharded(of_its_input, depth);
  }
}

int64_t gathers() { return process_context().count(CollectiveKind::kAllGather).calls; }

TEST(Training, ABackwardGathersNothingAgainForAListOfARootThatItDoesNotRead) {
  if (world_size() == 1) GTEST_SKIP() << "one rank gathers nothing";
  Chain net;
  net->register_parameter("shift", torch::zeros({6})); // of the root, whose backward needs no value
  for (const auto& layer : *net->layers) fully_shard(*layer, world_mesh());
  auto root = fully_shard(*net, world_mesh());
  const auto gathers_of_step = [&] {
    const auto before = gathers();
    net->forward(torch::ones({2, 6}, torch::TensorOptions(world_mesh().device())) + net->named_parameters()["shift"], -1)
        .square()
        .mean()
        .backward();
    net->zero_grad();
    return gathers() - before;
  };
  gathers_of_step();
  const auto without_list = gathers_of_step();
  root.set_modules_to_backward_prefetch({fsdp(*net->layers[3])});
  EXPECT_EQ(gathers_of_step(), without_list);
}

TEST(Training, DerivativesOfInputsGatherEachGroupOnceWhereGroupsAreKept) {
  if (world_size() == 1) GTEST_SKIP() << "one rank gathers nothing";
  Chain net;
  for (const auto& layer : *net->layers) fully_shard(*layer, world_mesh());
  auto root = fully_shard(*net, world_mesh());
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  const auto gathers_of_step = [&](bool with_derivatives) {
    const auto before = gathers();
    const auto x = torch::ones({2, 6}, torch::TensorOptions(world_mesh().device())).requires_grad_();
    const auto u = net->forward(x, -1);
    auto loss = u.square().mean();
    if (with_derivatives) {
      const auto first = torch::autograd::grad({u.sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
      const auto second = torch::autograd::grad({first.sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
      loss = loss + second.square().mean();
    }
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    return gathers() - before;
  };
  gathers_of_step(true);
  EXPECT_GT(gathers_of_step(true), 4);
  root.set_reshard_after_forward(false);
  root.set_reshard_after_backward(false);
  gathers_of_step(true);
  EXPECT_EQ(gathers_of_step(true), 4);
  EXPECT_EQ(gathers_of_step(world_rank() == 0), 4); // the other ranks have boundary points alone
}

} // namespace
} // namespace tessera::testing::training_test
