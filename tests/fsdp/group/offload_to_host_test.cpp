// Shards, gradients and the optimizer's state in the host's memory. On a mesh of CPUs that is the device's own, and nothing would
// be tested.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/fsdp/reshard_parameters.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/fsdp/offload_training.h>
#include <tessera/tests/support/simulated_device/simulated_device.h>
#include <tessera/tests/support/sweep.h>

namespace tessera::testing::offload_to_host_test {
namespace {

Strategy offloaded(Strategy strategy, bool pins = true) {
  strategy.name += pins ? ", in pinned memory" : ", in pageable memory";
  strategy.options.offload = offload_to_host(pins);
  return strategy;
}

void expect_on_host(const torch::Tensor& tensor, bool is_pinned) {
  const auto local = DTensor(tensor).local();
  EXPECT_TRUE(local.is_cpu());
  if (local.numel() > 0 && !tests_the_cpu()) EXPECT_EQ(local.is_pinned(), is_pinned);
}

TEST(OffloadToHost, TrainsAsOnTheDevice) {
  for (const auto& strategy : sweep(strategies(), 3, is_default)) {
    for (const auto& maker : makers()) {
      if (maker.name != "AdamW" && !strategy.name.starts_with("full")) continue;
      auto plain = make_training(strategy, maker);
      const auto losses = train(plain, 0, 4);
      for (const bool pins : {true, false}) {
        const auto host = offloaded(strategy, pins);
        SCOPED_TRACE(host.name + ", " + maker.name);
        auto training = make_training(host, maker);
        expect_same(train(training, 0, 4), losses);
        expect_same(training.net, plain.net);
        for (const auto& parameter : training.net->parameters()) {
          expect_on_host(parameter, pins);
          expect_on_host(parameter.grad(), pins);
        }
      }
    }
  }
}

/// Forward computes with a parameter alone before it meets anything of the device.
struct Triangle : torch::nn::Module {
  Triangle() : weight(register_parameter("weight", torch::randn({6, 6}))) {}
  torch::Tensor forward(const torch::Tensor& x) { return x.matmul(weight.triu()) + (weight.t() - 1).square().sum(); }
  torch::Tensor weight;
};

TEST(OffloadToHost, ComputesOnTheDeviceWhatForwardMakesOfAParameterAlone) {
  const auto mesh = init_device_mesh(test_device_type(), {world_size()});
  const auto x = torch::arange(12.0).view({2, 6}).to(test_device());
  for (const bool replicates : {false, true}) {
    std::vector<std::vector<torch::Tensor>> results;
    for (const auto& offload : {OffloadPolicy(), offload_to_host()}) {
      torch::manual_seed(1);
      Triangle model;
      FullyShardOptions options;
      options.offload = offload;
      replicates ? replicate(model, mesh, options) : fully_shard(model, mesh, options);
      const auto y = model.forward(x);
      y.sum().backward();
      const torch::NoGradGuard no_grad;
      auto sum = model.weight * 0.5;
      sum.add_(torch::ones({6, 6}).to(test_device()));
      results.push_back({y.detach(), model.forward(x), sum, full(model.weight.grad()).to(test_device())});
    }
    for (const auto& each : results[1]) EXPECT_EQ(each.device().type(), test_device_type());
    expect_same(results[1], results[0]);
  }
}

/// Of parameters some of which are offloaded.
struct Adapted : torch::nn::Module {
  Adapted()
      : base(register_module("base", torch::nn::Linear(6, 6))),
        a(register_parameter("a", torch::randn({1, 6}))),
        b(register_parameter("b", torch::randn({6, 1}))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return torch::linear(x, base->weight + b.mm(a), base->bias) + (b.mm(a) * (base->weight * 2)).sum() +
           torch::cat({a, base->weight}).sum();
  }
  torch::nn::Linear base;
  torch::Tensor a, b;
};

TEST(OffloadToHost, ParametersOfTwoDevicesMeet) {
  const auto mesh = init_device_mesh(test_device_type(), {world_size()});
  const auto x = torch::arange(12.0).view({2, 6});
  const torch::NoGradGuard no_grad;
  for (const bool offloads_base : {false, true}) {
    torch::manual_seed(1);
    Adapted model;
    const auto expected = model.forward(x);
    FullyShardOptions on_host, on_device;
    on_host.offload = offload_to_host();
    fully_shard(*model.base, mesh, offloads_base ? on_host : on_device);
    fully_shard(model, mesh, offloads_base ? on_device : on_host);
    EXPECT_TENSORS_CLOSE(model.forward(x.to(test_device())).cpu(), expected, 1e-5, 1e-5);

    auto copy = torch::empty_like(model.b.mm(model.a));
    copy.copy_(model.base->weight * 2); // a write crosses devices, and leaves a DTensor one
    EXPECT_TRUE(is_dtensor(copy));
    EXPECT_TENSORS_CLOSE(full(copy).cpu(), full(model.base->weight).cpu() * 2, 1e-6, 1e-6);
  }
}

TEST(OffloadToHost, TrainsAfterABlockWasAdded) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    std::vector<std::vector<torch::Tensor>> losses;
    for (const auto& each : {strategy, offloaded(strategy)}) {
      auto training = make_training(each, makers()[1]);
      train(training, 0, 1);
      training.net->zero_grad();
      torch::manual_seed(1);
      training.net->blocks->push_back(Block(18));
      reshard_parameters(*training.net);
      training.optimizer = makers()[1].make(training.net->parameters());
      losses.push_back(train(training, 1, 3));
    }
    expect_same(losses[1], losses[0]);
  }
}

TEST(OffloadToHost, SeesAndShowsTrueValues) {
  for (const auto& strategy : sweep(strategies(), 2, is_default)) {
    SCOPED_TRACE(strategy.name);
    auto plain = make_training(strategy, makers()[1]), host = make_training(offloaded(strategy), makers()[1]);
    int64_t number = 0;
    auto clipped = Clipped::kNo;
    for (const auto& habit : habits()) {
      SCOPED_TRACE(habit.name);
      expect_same(train(host, number, number + 1), train(plain, number, number + 1), clipped);
      ++number;
      for (auto* each : {&host, &plain}) habit.run(*each);
      if (habit.name == "clip") clipped = Clipped::kYes;
      for (size_t i = 0; i < plain.net->parameters().size(); ++i) {
        const auto got = host.net->parameters()[i].grad(), expected = plain.net->parameters()[i].grad();
        ASSERT_EQ(got.defined(), expected.defined());
        if (got.defined()) expect_same({full(got)}, {full(expected)}, clipped);
      }
      expect_same(host.net, plain.net, clipped);
    }
  }
}

TEST(OffloadToHost, TrainsInBFloat16) {
  auto strategy = strategies()[0];
  strategy.options.mixed_precision = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
  auto plain = make_training(strategy, makers()[1]), host = make_training(offloaded(strategy), makers()[1]);
  expect_same(train(host, 0, 4), train(plain, 0, 4));
  expect_same(host.net, plain.net);
}

TEST(OffloadToHost, SavesAndLoads) {
  const SharedFolder shared;
  for (const bool from_host : {false, true}) {
    for (const bool to_host : {false, true}) {
      SCOPED_TRACE(c10::str("saved ", from_host ? "from the host" : "from the device", ", loaded ",
                            to_host ? "to the host" : "to the device"));
      const auto make = [&](bool in_host, size_t which) {
        const auto strategy = strategies()[which];
        return make_training(in_host ? offloaded(strategy) : strategy, makers()[1]);
      };
      auto saved = make(from_host, 0), loaded = make(to_host, strategies().size() / 2);
      train(saved, 0, 2);
      train(loaded, 5, 6);
      const auto path = shared.path() / c10::str(from_host, to_host);
      checkpoint::save(state_dict(*saved.net, *saved.optimizer), path);
      auto state = state_dict(*loaded.net, *loaded.optimizer);
      checkpoint::load(state, path);
      const auto expected = train(saved, 2, 4), got = train(loaded, 2, 4);
      for (size_t i = 0; i < got.size(); ++i) EXPECT_TENSORS_CLOSE(got[i], expected[i], 1e-5, 1e-6);
    }
  }
}

/// Keeps each gradient of this rank's part, as soon as it is there.
struct KeepGradient : torch::autograd::PostAccumulateGradHook {
  explicit KeepGradient(std::vector<torch::Tensor>& seen) : kept(seen) {}
  void operator()(const torch::autograd::Variable& parameter) override {
    kept.push_back(DTensor(parameter.grad()).local().clone());
  }
  std::vector<torch::Tensor>& kept;
};

TEST(OffloadToHost, AHookOfAGradientFindsItsValues) {
  for (const size_t which : {size_t{0}, size_t{1}}) {
    SCOPED_TRACE(strategies()[which].name);
    std::vector<std::vector<torch::Tensor>> seen(2);
    for (const bool on_host : {false, true}) {
      auto training = make_training(on_host ? offloaded(strategies()[which]) : strategies()[which], makers()[1]);
      for (auto& parameter : training.net->parameters()) {
        parameter.register_hook([](const torch::Tensor& gradient) { return gradient * 2; });
        torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<KeepGradient>(seen[on_host]));
      }
      train(training, 0, 3);
      for (auto& gradient : seen[on_host]) gradient = gradient.cpu();
    }
    expect_same(seen[1], seen[0]);
  }
}

/// Ways in which a program writes the parameters, while copies for a forward that it has called may still be on their way.
std::vector<Habit> writers() {
  return {{"an operator",
           [](Training& each) {
             const torch::NoGradGuard no_grad;
             for (auto& parameter : each.net->parameters()) parameter.mul_(0.5);
           }},
          {"a load of a state dict", [](Training& each) { load_state_dict(*each.net, state_dict(*make_net(5))); }},
          {"a load of a checkpoint", [](Training& each) {
             const SharedFolder shared;
             checkpoint::save(state_dict(*make_net(6)), shared.path() / "c");
             loss_on_device(each.net, own_batch_on_device(3));
             checkpoint::load(state_dict(*each.net), shared.path() / "c");
           }}};
}

TEST(OffloadToHost, AWriteWaitsForTheCopiesOfAForward) {
  for (const auto& strategy : sweep(strategies(), 2, is_default)) {
    for (const auto& writer : writers()) {
      SCOPED_TRACE(strategy.name + ", " + writer.name);
      std::vector<std::vector<torch::Tensor>> losses;
      for (const auto& each : {strategy, offloaded(strategy)}) {
        auto training = make_training(each, makers()[0]);
        auto& of_side = losses.emplace_back();
        const torch::NoGradGuard no_grad;
        for (int64_t number = 0; number < 2; ++number) {
          of_side.push_back(loss_on_device(training.net, own_batch_on_device(number)));
          writer.run(training);
        }
        of_side.push_back(loss_on_device(training.net, own_batch_on_device(2)));
        for (auto& loss : of_side) loss = mean_over_ranks(loss);
      }
      expect_same(losses[1], losses[0]);
    }
  }
}

/// Of a step without clipping, whose norm a program may read.
std::map<std::string, int64_t> blocks_of_a_step(Training& training, bool accumulates) {
  const auto batch = own_batch_on_device(0);
  sim::synchronize();
  sim::reset_counters();
  if (accumulates) {
    const auto scope = no_sync(*training.net);
    loss_on_device(training.net, batch).backward();
  }
  loss_on_device(training.net, batch).backward();
  step(*training.optimizer);
  training.optimizer->zero_grad();
  return sim::counters().synchronizations;
}

/// The host waits once a step: at the end of the backward, for the gradients, which the optimizer reads.
TEST(OffloadToHost, AStepBlocksTheHostOnceForTheGradients) {
  if (test_device_type() != sim::kDeviceType) GTEST_SKIP() << "the simulated device counts what blocks the host";
  for (const auto& strategy : sweep(strategies(), 3, is_default)) {
    for (const bool accumulates : {false, true}) {
      SCOPED_TRACE(strategy.name + (accumulates ? ", accumulating" : ""));
      auto training = make_training(offloaded(strategy), makers()[1]);
      for (int i = 0; i < 2; ++i) blocks_of_a_step(training, accumulates);
      for (int i = 0; i < 2; ++i) {
        const auto blocks = blocks_of_a_step(training, accumulates);
        const std::map<std::string, int64_t> expected{{"event", 1}};
        EXPECT_THAT(blocks, ::testing::AnyOf(expected, std::map<std::string, int64_t>())); // none where it is done by then
      }
    }
  }
}

} // namespace
} // namespace tessera::testing::offload_to_host_test
