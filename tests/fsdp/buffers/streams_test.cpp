// The streams of fully_shard, on the simulated device: every strategy without a race, and what a step costs the host and the
// device.
#include <c10/core/StreamGuard.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <string>
#include <vector>

#include <tessera/fsdp/buffers/side_stream.h>
#include <tessera/fsdp/clip_grad.h>
#include <tessera/fsdp/model/sharded_module.h>
#include <tessera/fsdp/no_sync.h>
#include <tessera/fsdp/unsharded.h>
#include <tessera/tests/fsdp/streams.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::streams_test {
namespace {

/// Three steps; the last accumulates the gradients of two batches.
std::vector<torch::Tensor> train(Net& net, c10::Device device) {
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));
  std::vector<torch::Tensor> losses;
  for (int64_t i = 0; i < 3; ++i) {
    optimizer.zero_grad();
    if (i == 2) {
      const auto accumulating = no_sync(*net); // nothing for a model that is not sharded
      (loss_of(net, batch_of(7, device)) / 2).backward();
    }
    const auto loss = loss_of(net, batch_of(i, device));
    loss.backward();
    if (device.is_cpu()) {
      torch::nn::utils::clip_grad_norm_(net->parameters(), 0.5);
    } else {
      clip_grad_norm_(*net, 0.5);
    }
    optimizer.step();
    losses.push_back(device.is_cpu() ? loss.detach().reshape({1}) : mean_over_ranks(loss));
  }
  return losses;
}

TEST_F(Streams, EveryStrategyTrainsAsTheUnshardedModelOfTheCpu) {
  Net plain = make_net();
  const auto expected = values(train(plain, torch::kCPU));
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Net net = make_net();
    shard_model(net, strategy);
    EXPECT_THAT(values(train(net, sim::kDevice)), ::testing::Pointwise(::testing::DoubleNear(1e-5), expected));
    expect_no_races();
  }
}

TEST_F(Streams, MixedPrecisionTrainsAsOnTheCpu) {
  for (const auto layout : {BufferLayout::kRagged, BufferLayout::kPerParameter}) {
    const auto losses_on = [&](at::DeviceType type) {
      mesh_device_type = type;
      Net net = make_net();
      Strategy strategy{"bf16"};
      strategy.options.layout = layout;
      strategy.options.mixed_precision = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
      shard_model(net, strategy);
      std::vector<torch::Tensor> losses;
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      for (int64_t i = 0; i < 3; ++i) {
        optimizer.zero_grad();
        const auto loss = loss_of(net, own_batch(i).to(world_mesh().device()));
        loss.backward();
        optimizer.step();
        losses.push_back(mean_over_ranks(loss.to(torch::kFloat)));
      }
      return values(losses);
    };
    EXPECT_THAT(losses_on(sim::kDeviceType), ::testing::Pointwise(::testing::DoubleNear(1e-5), losses_on(torch::kCPU)));
    expect_no_races();
  }
}

/// A program computes on two streams, in any order, and reads parameters on both.
TEST_F(Streams, EachReadingStreamWaitsForTheGatherAndIsWaitedFor) {
  Net net = make_net();
  shard_model(net, strategies()[0]);
  auto& block = *net->blocks[0];
  const auto weight = block.as<Block>()->up->weight;
  const auto expected = full(weight).cpu();
  const auto side = sim::new_stream("side");
  for (int round = 0; round < 3; ++round) {
    const torch::NoGradGuard no_grad;
    const auto here = unsharded(weight).clone();
    torch::Tensor there;
    {
      const c10::StreamGuard guard(side);
      there = unsharded(weight).clone();
    }
    fsdp(block).reshard(); // while both may still read
    write_memory_of(unsharded_bytes(block));
    sim::synchronize();
    EXPECT_TRUE(torch::equal(here.cpu(), expected));
    EXPECT_TRUE(torch::equal(there.cpu(), expected));
  }
  expect_no_races();
}

/// Where a backward runs on a stream of the program's, the gradients land on that of fully_shard, which has the buffers. They are
/// given back on the program's, while something else computes on the other.
TEST_F(Streams, ReduceBuffersAreFreedInTheOrderOfTheirStream) {
  Net net = make_net();
  shard_model(net, strategies()[0]);
  const auto tokens = batch_of(0, sim::kDevice);
  sim::synchronize();
  const auto training = sim::new_stream("training");
  for (int round = 0; round < 2; ++round) {
    {
      const c10::StreamGuard guard(training);
      loss_of(net, tokens).backward();
    }
    write_memory_of_reductions(net);
    sim::synchronize();
  }
  expect_no_races();
}

TEST_F(Streams, AWriteComesAfterAGatherThatReadsTheShard) {
  Net net = make_net();
  shard_model(net, strategies()[0]);
  auto& block = *net->blocks[0];
  const auto weight = block.as<Block>()->up->weight;
  const torch::NoGradGuard no_grad;
  for (int round = 0; round < 3; ++round) {
    const auto handle = fsdp(block).unshard_async();
    weight.fill_(round);
    EXPECT_TRUE(torch::equal(unsharded(weight).cpu(), torch::full(weight.sizes(), static_cast<double>(round)).to(torch::kFloat)));
  }
  expect_no_races();
}

TEST_F(Streams, AGroupMayBeFreedOnAnotherStreamThanItsOwn) {
  Net net = make_net();
  shard_model(net, strategies()[0]);
  auto& block = *net->blocks[0];
  for (int round = 0; round < 3; ++round) {
    const auto handle = fsdp(block).unshard_async();
    {
      const c10::StreamGuard guard(sim::new_stream("side"));
      fsdp(block).reshard();
    }
    write_memory_of(unsharded_bytes(block));
  }
  expect_no_races();
}

TEST_F(Streams, AModelMayEndWhileItIsGathered) {
  for (int round = 0; round < 3; ++round) {
    Net net = make_net();
    shard_model(net, strategies()[0]);
    const auto bytes = unsharded_bytes(*net->blocks[0]);
    { const auto handle = fsdp(*net->blocks[0]).unshard_async(); }
    net = nullptr;
    write_memory_of(bytes);
  }
  expect_no_races();
}

TEST_F(Streams, AModelMayEndWhileItsGradientsAreReduced) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    for (int round = 0; round < 2; ++round) {
      Net net = make_net();
      shard_model(net, strategy);
      fsdp(*net).set_is_last_backward(false); // the last reductions are not waited for
      loss_of(net, batch_of(0, sim::kDevice)).backward();
      const auto sizes = bytes_of_reductions(net);
      net = nullptr;
      for (const auto bytes : sizes) write_memory_of(bytes);
    }
    expect_no_races();
  }
}

TEST_F(Streams, WhatBeganBeforeAnErrorComesBeforeWhatFollows) {
  const internal::SideStream stream(sim::kDevice);
  auto tensor = torch::zeros({100}, sim::kDevice);
  const auto first_of_two = [&]() -> Work {
    tensor.add_(1);
    throw std::runtime_error("the second of two things");
  };
  EXPECT_THROWS_WITH(stream.run(first_of_two), "the second of two things");
  tensor.add_(1);
  expect_no_races();
}

/// The backward ends with an exception at the first block, while the reductions of the others may run.
void fail_in_backward(Net& net, const torch::Tensor& tokens) {
  auto x = net->embedded(tokens);
  x.register_hook([](const torch::Tensor&) { throw std::runtime_error("no further"); });
  for (auto& block : *net->blocks) x = block->as<Block>()->forward(x);
  EXPECT_THROWS_WITH(net->norm(x).sum().backward(), "no further");
}

/// The next forward forgets what the failed backward began, on its stream or on another.
TEST_F(Streams, AFailedBackwardFreesItsBuffersInOrder) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Net net = make_net();
    shard_model(net, strategy);
    const auto tokens = batch_of(0, sim::kDevice);
    for (const auto& stream : {sim::stream(), sim::new_stream("evaluation")}) {
      sim::synchronize(); // the tokens, for the other stream
      for (int round = 0; round < 2; ++round) {
        fail_in_backward(net, tokens);
        {
          const c10::StreamGuard guard(stream);
          loss_of(net, tokens);
        }
        write_memory_of_reductions(net);
      }
    }
    expect_no_races();
  }
}

/// Gradients are reduced inside groups in three backwards, and between them in the last.
TEST_F(Streams, GradientsMayWaitForTheAllReduce) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    std::vector<std::vector<double>> sums;
    for (const auto type : {at::kCPU, sim::kDeviceType}) {
      mesh_device_type = type;
      Net net = make_net();
      shard_model(net, strategy);
      auto handle = fsdp(*net);
      for (int64_t i = 0; i < 3; ++i) {
        handle.set_requires_all_reduce(i == 2);
        loss_of(net, own_batch(i).to(world_mesh().device())).backward();
      }
      sums.emplace_back();
      for (const auto& parameter : net->parameters()) sums.back().push_back(full(parameter.grad()).abs().sum().item<double>());
    }
    EXPECT_THAT(sums[1], ::testing::Pointwise(::testing::DoubleNear(1e-4), sums[0]));
    expect_no_races();
  }
}

TEST_F(Streams, AProgramMayTrainOnAStreamOfItsOwn) {
  Net plain = make_net();
  const auto expected = values(train(plain, torch::kCPU));
  Net net = make_net();
  shard_model(net, strategies()[0]);
  sim::synchronize();
  std::vector<torch::Tensor> losses;
  {
    const c10::StreamGuard guard(sim::new_stream("training"));
    losses = train(net, sim::kDevice);
    EXPECT_THAT(values(losses), ::testing::Pointwise(::testing::DoubleNear(1e-5), expected));
  }
  expect_no_races();
}

/// A step without clipping, whose norm a program may read.
void plain_step(Net& net, torch::optim::Optimizer& optimizer, const torch::Tensor& batch) {
  optimizer.zero_grad();
  loss_of(net, batch).backward();
  optimizer.step();
}

/// As where adapters are trained; and clipping whose norm nobody reads.
TEST_F(Streams, FrozenParametersAndClippingBlockNoHost) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Net net = make_net();
    for (auto& block : *net->blocks) block->as<Block>()->up->weight.set_requires_grad(false);
    shard_model(net, strategy);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    const auto batch = batch_of(0, sim::kDevice);
    for (int64_t i = 0; i < 4; ++i) {
      sim::synchronize();
      sim::reset_counters();
      optimizer.zero_grad();
      loss_of(net, batch).backward();
      clip_grad_norm_(*net, 0.5);
      optimizer.step();
      if (i < 2) continue;
      for (const auto& [cause, times] : sim::counters().synchronizations)
        ADD_FAILURE() << cause << " blocks the host " << times << " times";
    }
    expect_no_races();
  }
}

TEST_F(Streams, ASteadyStepBlocksNoHostAndPeaksAlike) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Net net = make_net();
    shard_model(net, strategy);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    const auto batch = batch_of(0, sim::kDevice);
    std::vector<int64_t> peaks;
    for (int64_t i = 0; i < 6; ++i) {
      sim::synchronize();
      sim::reset_counters();
      plain_step(net, optimizer, batch);
      const auto counters = sim::counters();
      if (i < 2) continue;
      for (const auto& [cause, times] : counters.synchronizations)
        ADD_FAILURE() << cause << " blocks the host " << times << " times";
      peaks.push_back(counters.peak_bytes);
    }
    EXPECT_THAT(peaks, ::testing::Each(peaks[0]));
    expect_no_races();
  }
}

struct LayersImpl : torch::nn::Module {
  explicit LayersImpl(int64_t depth) : layers(register_module("layers", torch::nn::ModuleList())) {
    for (int64_t i = 0; i < depth; ++i) layers->push_back(torch::nn::Linear(torch::nn::LinearOptions(32, 32).bias(false)));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : *layers) x = layer->as<torch::nn::Linear>()->forward(x);
    return x;
  }
  torch::nn::ModuleList layers;
};
TORCH_MODULE(Layers);

/// The names of what runs in the profiler's user scope, in this thread and in its backward.
std::vector<std::string> profiled(const std::function<void()>& call) {
  static std::vector<std::string> names; // a callback is a plain function
  names.clear();
  const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback([](const at::RecordFunction& function) {
                                                   names.emplace_back(function.name());
                                                   return std::unique_ptr<at::ObserverContext>();
                                                 }).scopes({at::RecordScope::USER_SCOPE}));
  call();
  at::removeCallback(handle);
  return names;
}

TEST_F(Streams, AProfilerSeesGathersAndReductionsByTheirModules) {
  if (world_size() == 1) GTEST_SKIP() << "one rank gathers and reduces nothing";
  Net net = make_net();
  shard_model(net, strategies()[0]);
  const auto names = profiled([&] { loss_of(net, batch_of(0, sim::kDevice)).backward(); });
  for (const auto* name : {"FSDP::all_gather (blocks.1", "FSDP::reduce_scatter (blocks.1", "FSDP::reduce_wait (blocks.1"})
    EXPECT_THAT(names, ::testing::Contains(::testing::AllOf(::testing::StartsWith(name), ::testing::HasSubstr(": "),
                                                            ::testing::HasSubstr("weight, "))));
}

constexpr double kProductUs = 100;

/// The modelled time of one step of 8 groups, and of its matrix products alone: 3 a group.
std::pair<double, double> modelled_step(double collective_us) {
  double products = 0;
  const auto work_us = [&](const std::string& name) {
    const bool is_product = name == "aten::mm" || name == "aten::addmm" || name == "aten::linear" || name == "aten::matmul";
    products += is_product ? kProductUs : 0;
    return is_product ? kProductUs : 0;
  };
  sim::configure({.time = {.launch_us = 0.1, .work_us = work_us, .collective_us = collective_us}});
  torch::manual_seed(0);
  Layers model(8);
  for (auto& layer : *model->layers) fully_shard(*layer, world_mesh());
  fully_shard(*model, world_mesh());
  const auto x = torch::ones({4, 32}, sim::kDevice);
  const auto step = [&] { model->forward(x).sum().backward(); };
  for (int i = 0; i < 2; ++i) step();
  sim::synchronize();
  products = 0;
  const auto begin = sim::Runtime::get().modelled_us();
  step();
  sim::synchronize();
  return {sim::Runtime::get().modelled_us() - begin, products};
}

TEST_F(Streams, ComputeCoversAllButTheFirstGatherAndTheLastReduction) {
  for (const double collective_us : {50.0, 90.0}) { // of 100, which a product takes
    const auto [step, products] = modelled_step(collective_us);
    EXPECT_GE(products, 2 * 8 * kProductUs);
    EXPECT_LE(step, products + 2 * collective_us + 0.1 * kProductUs);
    if (collective_us <= 50) EXPECT_LE(step, 1.05 * products);
    RecordProperty(c10::str("step_over_compute_", collective_us), c10::str(step / products));
  }
}

} // namespace
} // namespace tessera::testing::streams_test
