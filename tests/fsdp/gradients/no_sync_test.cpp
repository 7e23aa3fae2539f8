// Gradient accumulation: the scope no_sync, and what an optimizer sees of gradients that wait for their reduction.
#include <tessera/tessera.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>

#include <tessera/fsdp/gradients/unreduced_gradient.h>
#include <tessera/fsdp/group/parameter_group.h>
#include <tessera/fsdp/model/sharded_module.h>

#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/fsdp/twin.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::no_sync_test {
namespace {

torch::Tensor part_loss(Net& net, int64_t step) { return loss_of(net, own_batch(step)); }

int64_t reductions() {
  const auto& context = process_context();
  return context.count(CollectiveKind::kReduceScatter).calls + context.count(CollectiveKind::kAllReduce).calls;
}

TEST(NoSync, AccumulatesWithoutCommunicationAndReducesAfterTheScope) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Net plain = make_net(), net = make_net();
    shard_model(net, strategy);
    for (int64_t step = 0; step < 3; ++step) (loss_of(plain, global_batch(step)) / 3).backward();
    process_context().reset_counters();
    {
      const auto scope = no_sync(*net);
      for (int64_t step = 0; step < 2; ++step) (part_loss(net, step) / 3).backward();
    }
    EXPECT_EQ(reductions(), 0);
    (part_loss(net, 2) / 3).backward();
    expect_equal_gradients(net, plain);
  }
}

TEST(NoSync, ScopesNestAndBringBackWhatWasSet) {
  Net plain = make_net(), net = make_net();
  shard_model(net, strategies()[0]);
  auto root = fsdp(*net);
  root.set_requires_gradient_sync(false);
  {
    const auto outer = no_sync(*net);
    { const auto inner = no_sync(*(*net->blocks)[0]); }
    part_loss(net, 0).backward();
  }
  part_loss(net, 1).backward(); // still off
  EXPECT_THROWS_WITH(torch::optim::SGD(net->parameters(), 0.1).step(), "was accumulated and never reduced");
  root.set_requires_gradient_sync(true);
  part_loss(net, 2).backward();
  for (int64_t step = 0; step < 3; ++step) loss_of(plain, global_batch(step)).backward();
  expect_equal_gradients(net, plain);
}

TEST(NoSync, ScopesOverlapAndTheLastOneEndsIt) {
  Net plain = make_net(), net = make_net();
  shard_model(net, strategies()[0]);
  std::unique_ptr<NoSync> scope;
  process_context().reset_counters();
  for (int64_t step = 0; step < 2; ++step) {
    scope = std::make_unique<NoSync>(*net); // before the one of the step before ends
    part_loss(net, step).backward();
  }
  EXPECT_EQ(reductions(), 0);
  scope.reset();
  part_loss(net, 2).backward();
  for (int64_t step = 0; step < 3; ++step) loss_of(plain, global_batch(step)).backward();
  expect_equal_gradients(net, plain);
}

TEST(NoSync, WhatIsSetInsideCountsFromTheEnd) {
  Net plain = make_net(), net = make_net();
  shard_model(net, strategies()[0]);
  auto root = fsdp(*net);
  root.set_requires_gradient_sync(false);
  process_context().reset_counters();
  {
    const auto scope = no_sync(*net);
    root.set_requires_gradient_sync(true);
    part_loss(net, 0).backward();
  }
  EXPECT_EQ(reductions(), 0);
  part_loss(net, 1).backward();
  for (int64_t step = 0; step < 2; ++step) loss_of(plain, global_batch(step)).backward();
  expect_equal_gradients(net, plain);
}

/// The groups in the new dtype are smaller, and there are more of them.
TEST(NoSync, EndsForGroupsThatWereMadeInside) {
  Net plain = make_net(), net = make_net();
  shard_model(net, {"buckets", world_mesh, {.bucket_bytes = 3000}, /*replicates=*/true});
  {
    const auto scope = no_sync(*net);
    reshard_parameters(net, {.dtype = torch::kDouble});
    process_context().reset_counters();
    part_loss(net, 0).backward();
    EXPECT_EQ(reductions(), 0);
  }
  part_loss(net, 1).backward();
  plain->to(torch::kDouble);
  for (int64_t step = 0; step < 2; ++step) loss_of(plain, global_batch(step)).backward();
  expect_equal_gradients(net, plain);
}

TEST(NoSync, TakesTheShardedModulesBelowOneThatIsNot) {
  Net net = make_net();
  net->to(test_device());
  for (auto& block : *net->blocks) fully_shard(*block, world_mesh());
  const torch::nn::Module& blocks = *net->blocks;
  EXPECT_FALSE(is_sharded(blocks));
  for (auto* parameter : {&net->embed->weight, &net->norm->weight, &net->norm->bias}) parameter->set_requires_grad(false);
  process_context().reset_counters();
  const auto scope = no_sync(blocks);
  part_loss(net, 0).backward();
  EXPECT_EQ(reductions(), 0);
}

TEST(NoSync, DoesNothingForAModelThatIsNotSharded) {
  Net net = make_net(), plain = make_net();
  {
    const auto scope = no_sync(*net);
    loss_of(net, global_batch(0)).backward();
  }
  loss_of(plain, global_batch(0)).backward();
  for (const auto& item : net->named_parameters())
    EXPECT_TENSORS_EQUAL(item.value().grad(), plain->named_parameters()[item.key()].grad());
  EXPECT_NO_THROW(static_cast<void>(no_sync(*torch::nn::ReLU()))); // without parameters
}

TEST(NoSync, IsAnErrorForAPartOfAShardedModule) {
  Net net = make_net();
  fully_shard(net, world_mesh());
  EXPECT_THROWS_WITH(static_cast<void>(no_sync(*net->norm)),
                     "no_sync: the parameters of torch::nn::LayerNormImpl were sharded with those of a module above it");
}

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<torch::Tensor>)>;

template <typename Optimizer, typename Options>
MakeOptimizer with(Options options) {
  return [options](std::vector<torch::Tensor> parameters) { return std::make_unique<Optimizer>(std::move(parameters), options); };
}

const std::map<std::string, MakeOptimizer>& optimizers() {
  namespace optim = torch::optim;
  static const std::map<std::string, MakeOptimizer> all{
      {"SGD", with<optim::SGD>(optim::SGDOptions(0.1))},
      {"SGD with momentum", with<optim::SGD>(optim::SGDOptions(0.1).momentum(0.9))},
      {"AdamW", with<optim::AdamW>(optim::AdamWOptions(0.1).weight_decay(0))},
      {"RMSprop", with<optim::RMSprop>(optim::RMSpropOptions(0.1))},
      {"Adagrad", with<optim::Adagrad>(optim::AdagradOptions(0.1))}};
  return all;
}

constexpr const char* kUnreduced = "was accumulated and never reduced";

TEST(UnreducedGradients, AreAnErrorInAnyOptimizerAndLeaveTheModelAsItWas) {
  for (const auto& [name, make] : optimizers()) {
    for (const bool after_a_step : {false, true}) {
      SCOPED_TRACE(name + (after_a_step ? ", with a reduced gradient beside it" : ""));
      Net plain = make_net(), net = make_net();
      shard_model(net, strategies()[0]);
      const auto optimizer = make(net->parameters());
      if (after_a_step) {
        loss_of(plain, global_batch(0)).backward();
        part_loss(net, 0).backward();
      }
      {
        const auto scope = no_sync(*net);
        part_loss(net, 1).backward();
      }
      const auto message = error_of([&] { optimizer->step(); });
      EXPECT_NE(message.find(kUnreduced), std::string::npos) << message;
      EXPECT_NE(message.find("the gradient of embed.weight on rank " + std::to_string(world_rank())), std::string::npos)
          << message;
      EXPECT_EQ(parameter_difference(*net, *plain), 0);
      part_loss(net, 2).backward(); // reduces all, and training goes on
      for (int64_t step = 1; step < 3; ++step) loss_of(plain, global_batch(step)).backward();
      expect_equal_gradients(net, plain);
      EXPECT_NO_THROW(optimizer->step());
    }
  }
}

using SetDelay = std::function<void(FSDPModule&, bool)>;

const std::map<std::string, SetDelay>& delays() {
  static const std::map<std::string, SetDelay> all{
      {"no sync", [](FSDPModule& root, bool on) { root.set_requires_gradient_sync(on); }},
      {"no all-reduce", [](FSDPModule& root, bool on) { root.set_requires_all_reduce(on); }},
      {"not the last backward", [](FSDPModule& root, bool on) { root.set_is_last_backward(on); }}};
  return all;
}

TEST(UnreducedGradients, AreFoundInEveryStrategyAndDelay) {
  for (const auto& strategy : strategies()) {
    for (const auto& [name, set] : delays()) {
      SCOPED_TRACE(strategy.name + ", " + name);
      Net plain = make_net(), net = make_net();
      shard_model(net, strategy);
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      auto root = fsdp(*net);
      set(root, false);
      part_loss(net, 0).backward();
      set(root, true);
      const auto parameters = net->parameters();
      const bool waits = std::any_of(parameters.begin(), parameters.end(),
                                     [](const auto& each) { return internal::unreduced_gradient(each.grad()) != nullptr; });
      const auto message = error_of([&] { optimizer.step(); });
      EXPECT_EQ(message.find(kUnreduced) != std::string::npos, waits) << message;
      if (name == "no sync") EXPECT_TRUE(waits);
      if (!waits) continue; // nothing communicates there: one rank, or no replicas
      part_loss(net, 1).backward();
      for (int64_t step = 0; step < 2; ++step) loss_of(plain, global_batch(step)).backward();
      expect_equal_gradients(net, plain);
    }
  }
}

/// No function that is no operator reads the gradient of norm.weight either.
void expect_unreadable(const torch::Tensor& gradient) {
  const SharedFolder folder;
  const DTensor dtensor(gradient);
  const Placements replicated(dtensor.placements().size(), Replicate{});
  StateDict state, saved;
  state.add("gradient", gradient);
  saved.add("gradient", torch::zeros(gradient.sizes()));
  checkpoint::save(saved, folder.path() / "zeros");
  const std::map<std::string, std::function<void()>> reads{
      {"to_local", [&] { to_local(gradient); }},
      {"to_local of data()", [&] { to_local(gradient.data()); }},
      {"local", [&] { static_cast<void>(dtensor.local()); }},
      {"full_tensor", [&] { static_cast<void>(dtensor.full_tensor()); }},
      {"redistribute", [&] { static_cast<void>(dtensor.redistribute(replicated)); }},
      {"redistribute_async", [&] { static_cast<void>(dtensor.redistribute_async(replicated)); }},
      {"save", [&] { checkpoint::save(state, folder.path() / "gradient", {.overwrite = true}); }},
      {"load", [&] { checkpoint::load(state, folder.path() / "zeros"); }},
      {"save_torch", [&] { checkpoint::save_torch(state, folder.path() / "gradient.pt", {.overwrite = true}); }},
      {"state dict of values", [&] { load_state_dict(state, state); }}};
  for (const auto& [name, read] : reads) {
    SCOPED_TRACE(name);
    const auto message = error_of(read);
    EXPECT_NE(message.find("reads the gradient of norm.weight on rank"), std::string::npos) << message;
    EXPECT_NE(message.find(kUnreduced), std::string::npos) << message;
  }
}

TEST(UnreducedGradients, CannotBeReadClippedGatheredOrSaved) {
  Net net = make_net();
  shard_model(net, strategies()[0]);
  {
    const auto scope = no_sync(*net);
    part_loss(net, 0).backward();
  }
  EXPECT_THROWS_WITH(clip_grad_norm_(*net, 1.0), kUnreduced);
  EXPECT_THROWS_WITH(clip_grad_value_(*net, 1.0), kUnreduced);
  EXPECT_THROWS_WITH(torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0), kUnreduced);
  const auto gradient = net->norm->weight.grad();
  EXPECT_EQ(gradient.sizes(), net->norm->weight.sizes());
  EXPECT_THROWS_WITH(gradient.clone(), "aten::clone reads the gradient of norm.weight on rank");
  EXPECT_THROWS_WITH(net->norm->weight.grad().norm().item<double>(), kUnreduced);
  expect_unreadable(gradient);
  EXPECT_NE(to_string(gradient).find("has no values"), std::string::npos);
  part_loss(net, 1).backward();
  EXPECT_NO_THROW(clip_grad_norm_(*net, 1.0));
}

TEST(UnreducedGradients, ZeroGradDropsWhatWasReducedAndKeepsWhatWaits) {
  for (const bool to_none : {true, false}) {
    SCOPED_TRACE(to_none);
    Net plain = make_net(), net = make_net();
    shard_model(net, strategies()[0]);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    part_loss(net, 0).backward();
    {
      const auto scope = no_sync(*net);
      part_loss(net, 1).backward();
      optimizer.zero_grad(to_none);
      part_loss(net, 2).backward();
      net->zero_grad(to_none);
    }
    part_loss(net, 3).backward();
    for (int64_t step = 1; step < 4; ++step) loss_of(plain, global_batch(step)).backward();
    expect_equal_gradients(net, plain);
  }
}

/// A program that catches an exception of a forward, and begins the step anew.
TEST(UnreducedGradients, OfAnAccumulationThatIsGivenUpAreDropped) {
  for (const auto& strategy : strategies()) {
    for (const auto& [name, set] : delays()) {
      for (const bool to_none : {true, false}) {
        SCOPED_TRACE(strategy.name + ", " + name + (to_none ? "" : ", to zero"));
        Net plain = make_net(), net = make_net();
        shard_model(net, strategy);
        auto root = fsdp(*net);
        part_loss(net, 0).backward(); // in grad() before the accumulation
        set(root, false);
        for (const int64_t step : {1, 2}) part_loss(net, step).backward();
        const auto tokens = own_batch(3);
        const auto of_another_size = torch::zeros({2, 3}, test_device());
        EXPECT_THROWS_WITH((*net->blocks)[1]->as<Block>()->forward(net->embedded(tokens)).flatten(0, -2).mm(of_another_size),
                           "cannot be multiplied");
        set(root, true);
        root.zero_grad(to_none);
        for (const auto& parameter : net->parameters()) EXPECT_EQ(parameter.grad().defined(), !to_none);
        for (const int64_t step : {4, 5}) {
          part_loss(net, step).backward();
          loss_of(plain, global_batch(step)).backward();
        }
        expect_equal_gradients(net, plain);
      }
    }
  }
}

TEST(UnreducedGradients, AreDroppedOfTheModulesBelowTheHandleAlone) {
  Net plain = make_net(), net = make_net();
  shard_model(net, strategies()[0]);
  {
    const auto scope = no_sync(*net);
    part_loss(net, 0).backward();
  }
  fsdp(*(*net->blocks)[0]).zero_grad();
  part_loss(net, 1).backward();
  loss_of(plain, global_batch(0)).backward();
  (*plain->blocks)[0]->zero_grad();
  loss_of(plain, global_batch(1)).backward();
  expect_equal_gradients(net, plain);
}

TEST(UnreducedGradients, AreDroppedBetweenAForwardAndItsBackward) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Net plain = make_net(), net = make_net();
    shard_model(net, strategy);
    {
      const auto scope = no_sync(*net);
      part_loss(net, 0).backward();
    }
    const auto loss = part_loss(net, 1);
    fsdp(*net).zero_grad();
    loss.backward();
    loss_of(plain, global_batch(1)).backward();
    expect_equal_gradients(net, plain);
  }
}

TEST(UnreducedGradients, AreNotDroppedInABackward) {
  Net net = make_net();
  shard_model(net, strategies()[0]);
  const auto hook = net->norm->weight.register_hook([&](const torch::Tensor&) { fsdp(*net).zero_grad(); });
  EXPECT_THROWS_WITH(part_loss(net, 0).backward(), "is called in a backward, on rank");
  net->norm->weight.remove_hook(hook);
}

TEST(UnreducedGradients, OfAFailedBackwardAreForgotten) {
  Net plain = make_net(), net = make_net();
  shard_model(net, strategies()[0]);
  part_loss(net, 0).backward();
  {
    const auto scope = no_sync(*net);
    part_loss(net, 1).backward();
    auto hook = net->norm->weight.register_hook([](const torch::Tensor&) { TORCH_CHECK(false, "thrown in a hook"); });
    auto x = net->embedded(own_batch(2));
    x.register_hook([](const torch::Tensor&) { TORCH_CHECK(false, "thrown in a hook"); });
    EXPECT_THROWS_WITH((*net->blocks)[0]->as<Block>()->forward(x).sum().backward(), "thrown in a hook");
    net->norm->weight.remove_hook(hook);
  }
  loss_of(plain, global_batch(0)).backward();
  part_loss(net, 3).backward();
  loss_of(plain, global_batch(3)).backward();
  expect_equal_gradients(net, plain);
}

TEST(UnreducedGradients, OfAFailedBackwardLetTheCommunicatorBeReplaced) {
  if (world_size() == 1) GTEST_SKIP() << "one rank reduces nothing";
  Net net = make_net();
  shard_model(net, strategies()[0]);
  auto x = net->embedded(own_batch(0));
  x.register_hook([](const torch::Tensor&) { TORCH_CHECK(false, "thrown in a hook"); });
  EXPECT_THROWS_WITH((*net->blocks)[0]->as<Block>()->forward(x).sum().backward(), "thrown in a hook");
  auto block = fsdp(*(*net->blocks)[0]);
  if (test_device().is_cpu()) {
    const internal::ModelLock lock(block.state()->schedule()->mutex());
    EXPECT_TRUE(block.state()->gradients(lock).is_unfinished());
  }
  const auto old = block.state()->group()->stages().reduce_scatter();
  block.set_custom_reduce_scatter(process_context().communicator(RankList(old->ranks()), old->device_type(), "own"));
  EXPECT_NE(block.state()->group()->stages().reduce_scatter(), old);
}

} // namespace
} // namespace tessera::testing::no_sync_test
