// Optimizers that step in backward, beside the same ones that step after it.
#include <gmock/gmock.h>
#include <tessera/fsdp/clip_grad.h>
#include <tessera/fsdp/explain.h>
#include <tessera/fsdp/micro_batch.h>
#include <tessera/fsdp/no_sync.h>
#include <tessera/fsdp/step_in_backward.h>
#include <tessera/optim/register_optimizer.h>
#include <tessera/optim/step.h>
#include <tessera/training/grad_scaler.h>

#include <tessera/tests/fsdp/held_memory.h>
#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/optim/optimizers.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>
#include <tessera/tests/support/temporary_folder.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing::backward_test {
namespace {

using OptimizerPtr = std::unique_ptr<torch::optim::Optimizer>;

at::Tensor own_loss(Net& net, int64_t step) { return loss_of(net, own_batch(step)); }

void expect_same_parameters(const Net& net, const Net& expected) {
  const auto others = expected->named_parameters();
  for (const auto& item : net->named_parameters())
    EXPECT_TRUE(torch::equal(full(item.value()), full(others[item.key()]))) << item.key();
}

void expect_no_gradients(const Net& net) {
  for (const auto& item : net->named_parameters()) EXPECT_FALSE(item.value().grad().defined()) << item.key();
}

Net sharded_net(const Strategy& strategy) {
  auto net = make_net();
  net->to(test_device());
  shard_model(net, strategy);
  return net;
}

/// Two models of one strategy; `run` trains the first in backward and the second with steps after it.
void expect_equal_steps(const OptimizerCase& each, const Strategy& strategy) {
  SCOPED_TRACE(each.name + ", " + strategy.name);
  auto net = sharded_net(strategy), after = sharded_net(strategy);
  const auto in_backward = each.make(net->parameters()), own = each.make(after->parameters());
  const auto stepping = step_in_backward(*net, *in_backward);
  for (int64_t step = 0; step < 3; ++step) {
    own_loss(net, step).backward();
    expect_no_gradients(net);
    in_backward->step(); // finds nothing
    own_loss(after, step).backward();
    own->step();
    own->zero_grad();
  }
  expect_same_parameters(net, after);
}

TEST(StepInBackward, EqualsAStepAfterIt) {
  for (const auto& each : sweep(optimizer_cases(), 5, [](const auto& one) { return one.name == "FusedAdamW"; })) {
    for (const auto& strategy : sweep(strategies(), 3, is_default)) expect_equal_steps(each, strategy);
  }
}

TEST(StepInBackward, EqualsAStepAfterItForEachStrategy) {
  const auto cases = optimizer_cases();
  for (const auto& strategy : strategies())
    expect_equal_steps(*std::ranges::find(cases, "FusedAdamW", &OptimizerCase::name), strategy);
}

TEST(StepInBackward, StepsAPlainModel) {
  for (const auto& each : optimizer_cases()) {
    SCOPED_TRACE(each.name);
    auto net = make_net(), after = make_net();
    const auto in_backward = each.make(net->parameters()), own = each.make(after->parameters());
    const auto stepping = step_in_backward(*net, *in_backward);
    for (int64_t step = 0; step < 2; ++step) {
      loss_of(net, global_batch(step)).backward();
      expect_no_gradients(net);
      loss_of(after, global_batch(step)).backward();
      own->step();
      own->zero_grad();
    }
    expect_same_parameters(net, after);
  }
}

TEST(StepInBackward, TakesAccumulatedGradientsOnce) {
  for (const auto& strategy : sweep(strategies(), 4, is_default)) {
    SCOPED_TRACE(strategy.name);
    auto net = sharded_net(strategy), after = sharded_net(strategy);
    FusedAdamW in_backward(net->parameters()), own(after->parameters());
    const auto stepping = step_in_backward(*net, in_backward);
    for (auto* each : {&net, &after}) {
      {
        const auto scope = no_sync(**each);
        own_loss(*each, 0).backward();
      }
      own_loss(*each, 1).backward();
    }
    expect_no_gradients(net);
    own.step();
    expect_same_parameters(net, after);
  }
}

TEST(StepInBackward, OfSeveralOptimizersInOneModel) {
  for (const auto& strategy : sweep(strategies(), 3, is_default)) {
    SCOPED_TRACE(strategy.name);
    auto net = sharded_net(strategy), after = sharded_net(strategy);
    const auto make = [](Net& each) {
      std::vector<at::Tensor> matrices, vectors;
      for (const auto& parameter : each->blocks->parameters()) (parameter.dim() >= 2 ? matrices : vectors).push_back(parameter);
      std::vector<OptimizerPtr> made;
      made.push_back(std::make_unique<Muon>(matrices, MuonOptions(0.02)));
      made.push_back(std::make_unique<Lamb>(vectors, LambOptions(0.01)));
      return made;
    };
    const auto in_backward = make(net), own = make(after);
    std::vector<StepInBackward> stepping;
    for (const auto& each : in_backward) stepping.push_back(step_in_backward(*net, *each));
    for (int64_t step = 0; step < 3; ++step) {
      own_loss(net, step).backward();
      own_loss(after, step).backward();
      for (const auto& each : own) each->step();
      for (const auto& each : own) each->zero_grad();
      EXPECT_TRUE(net->embed->weight.grad().defined()); // of no optimizer
      net->zero_grad();
      after->zero_grad();
    }
    expect_same_parameters(net, after);
  }
}

TEST(StepInBackward, EndsWithItsHandle) {
  auto net = sharded_net(strategies()[0]);
  FusedSGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
  { const auto stepping = step_in_backward(*net, optimizer); }
  own_loss(net, 0).backward();
  for (const auto& item : net->named_parameters()) EXPECT_TRUE(item.value().grad().defined()) << item.key();
  EXPECT_NO_THROW(clip_grad_norm_(*net, 1.0));
}

TEST(StepInBackward, MayLimitGradientsBefore) {
  auto net = sharded_net(strategies()[0]), after = sharded_net(strategies()[0]);
  FusedSGD in_backward(net->parameters(), torch::optim::SGDOptions(0.1)), own(after->parameters(), torch::optim::SGDOptions(0.1));
  size_t seen = 0;
  const auto stepping = step_in_backward(*net, in_backward, {.before_step = [&](const std::vector<at::Tensor>& parameters) {
    seen += parameters.size();
    torch::nn::utils::clip_grad_value_(parameters, 1e-3);
  }});
  own_loss(net, 0).backward();
  own_loss(after, 0).backward();
  clip_grad_value_(*after, 1e-3);
  own.step();
  EXPECT_EQ(seen, net->parameters().size());
  expect_same_parameters(net, after);
}

/// The most bytes of a step, beyond what there was before it.
int64_t peak_of_step(const Strategy& strategy, bool in_backward) {
  HeldMemory held;
  torch::manual_seed(0);
  Net net(61, /*width=*/128, /*depth=*/12);
  shard_model(net, strategy);
  FusedSGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
  std::optional<StepInBackward> stepping;
  if (in_backward) stepping.emplace(step_in_backward(*net, optimizer));
  const auto step = [&] {
    net->forward(torch::zeros({1, 1}, torch::kLong)).sum().backward();
    if (in_backward) return;
    optimizer.step();
    optimizer.zero_grad();
  };
  for (int warm_up = 0; warm_up < 3; ++warm_up) step();
  held.forget_peak();
  step();
  const auto explained = explain(*net, {.optimizer_tensors = 0}).memory;
  EXPECT_NEAR(static_cast<double>(explained.peak) / static_cast<double>(held.peak()), 1, 0.05)
      << explained.peak_at << ", gradients " << explained.gradients;
  return held.peak();
}

TEST(StepInBackward, NeedsOneGradientAParameterLess) {
  if (!tests_the_cpu()) GTEST_SKIP() << "counts the memory of the CPU";
  for (const auto& strategy : strategies()) {
    if (!strategy.name.starts_with("full") && strategy.name != "no-shard in buckets") continue;
    SCOPED_TRACE(strategy.name);
    const auto after = peak_of_step(strategy, false), in_backward = peak_of_step(strategy, true);
    const int64_t block = 4 * (6 * 128 * 128 + 5 * 128), gradients = 12 * block; // those of the rest stay small
    const int64_t ranks = strategy.name.starts_with("full") ? world_size() : 1;
    EXPECT_GT(after - in_backward, (gradients - 4 * block) / ranks) << "of " << after;
  }
}

TEST(StepInBackward, StepsWhatLiesOnTheHostAndInFiles) {
  for (const bool in_files : {false, true}) {
    SCOPED_TRACE(in_files ? "in files" : "on the host");
    const TemporaryFolder folder;
    auto strategy = strategies()[0];
    strategy.options.offload = in_files ? offload_to_files(folder.path().string(), false) : offload_to_host(false);
    auto net = sharded_net(strategy), after = sharded_net(strategies()[0]);
    FusedAdamW in_backward(net->parameters()), own(after->parameters());
    const auto stepping = step_in_backward(*net, in_backward);
    for (int64_t step = 0; step < 3; ++step) {
      const auto tokens = own_batch(step).to(test_device());
      auto x = net->embed(tokens.slice(1, 0, -1));
      for (auto& block : *net->blocks) x = block->as<Block>()->forward(x);
      const auto logits = torch::matmul(net->norm(x), net->embed->weight.t());
      torch::nn::functional::cross_entropy(logits.reshape({-1, logits.size(-1)}), tokens.slice(1, 1).reshape({-1})).backward();
      expect_no_gradients(net);
      own_loss(after, step).backward();
      own.step();
      own.zero_grad();
    }
    expect_same_parameters(net, after);
  }
}

/// Counts its steps in a value of its own, on which they depend.
struct Counted : torch::optim::SGD {
  using SGD::SGD;
  at::Tensor step(LossClosure closure = nullptr) override {
    ++count;
    for (auto& group : param_groups()) group.options().set_lr(0.1 / static_cast<double>(count));
    return SGD::step(std::move(closure));
  }
  int64_t count = 0;
};

TEST(StepInBackward, CountsOneStepOfTheOptimizer) {
  [[maybe_unused]] static const bool registered = [] {
    register_optimizer<Counted, torch::optim::SGDParamState, torch::optim::SGDOptions>(
        "Counted", {}, {{"lr", &torch::optim::SGDOptions::lr}}, {{"count", &Counted::count}});
    return true;
  }();
  auto net = sharded_net(strategies()[0]);
  Counted optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
  const auto stepping = step_in_backward(*net, optimizer);
  for (int64_t step = 0; step < 3; ++step) own_loss(net, step).backward();
  EXPECT_EQ(optimizer.count, 3);
}

TEST(StepInBackward, RefusesWhatNeedsAllGradients) {
  auto net = sharded_net(strategies()[0]);
  FusedSGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
  const auto stepping = step_in_backward(*net, optimizer);
  EXPECT_THROWS_WITH((void)step_in_backward(*net, optimizer), "another optimizer steps embed.weight in its backward already");
  GradScaler scaler;
  scaler.scale(own_loss(net, 0)).backward();
  EXPECT_THROWS_WITH(clip_grad_norm_(*net, 1.0), "embed.weight is stepped in its backward (step_in_backward)");
  EXPECT_THROWS_WITH(clip_grad_value_(*net, 1.0), "embed.weight is stepped in its backward (step_in_backward)");
  EXPECT_THROWS_WITH(scaler.step(optimizer), "embed.weight is stepped in its backward (step_in_backward)");
  EXPECT_THROWS_WITH(fsdp(*net).set_is_last_backward(false), "would be stepped after set_is_last_backward(false)");
}

TEST(StepInBackward, RefusesToAccumulateWhatIsInNoGroup) {
  auto net = make_net();
  net->to(test_device());
  const auto ignored = net->norm->parameters();
  fully_shard(net, world_mesh(), {.ignored_params = ignored});
  FusedSGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
  const auto stepping = step_in_backward(*net, optimizer);
  EXPECT_THROWS_WITH((void)no_sync(*net), "norm.weight is in no group, and would be stepped in each backward");
}

TEST(StepInBackward, IsNotLookedForWhereAutogradHasNeverBeen) {
  if (world_size() > 1) GTEST_SKIP() << "the model is plain";
  torch::nn::Linear layer(3, 2);
  layer->register_parameter("frozen", torch::ones({2}), /*requires_grad=*/false);
  layer->forward(torch::ones({1, 3})).sum().backward();
  EXPECT_NEAR(clip_grad_norm_(*layer, 1.0).item<double>(), std::sqrt(8.0), 1e-6);
}

TEST(StepInBackward, RefusesOptimizersThatItCannotStep) {
  auto net = sharded_net(strategies()[0]);
  torch::optim::LBFGS lbfgs(net->parameters());
  EXPECT_THROWS_WITH((void)step_in_backward(*net, lbfgs), "LBFGS computes with all parameters together");
  FusedSGD other({torch::ones({3}).requires_grad_()}, torch::optim::SGDOptions(0.1));
  EXPECT_THROWS_WITH((void)step_in_backward(*net, other), "a parameter of shape [3], which the module lacks");
  FusedSGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
  own_loss(net, 0).backward();
  EXPECT_THROWS_WITH((void)step_in_backward(*net, optimizer), "embed.weight has a gradient already: call zero_grad before");
  net->zero_grad();
  EXPECT_NO_THROW((void)step_in_backward(*net, optimizer)); // what the refused one has marked is free
}

} // namespace
} // namespace tessera::testing::backward_test
