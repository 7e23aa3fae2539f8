// Sharded models on the simulated device: no races, and the losses of an unsharded model on the CPU.
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/simulated_device/communicator.h>
#include <tessera/tests/support/simulated_device/simulated_device.h>

namespace tessera::testing::simulated_device_test {
namespace {

DeviceMesh simulated_mesh() { return init_device_mesh(sim::kDeviceType, {world_size()}, {"shard"}); }

torch::Tensor own_batch_on_device(int64_t step) { return own_batch(step).to(sim::kDevice); }

Net sharded_net(const FullyShardOptions& options = {}) {
  Net net = make_net();
  for (auto& block : *net->blocks) fully_shard(*block, simulated_mesh(), options);
  fully_shard(*net, simulated_mesh(), options);
  return net;
}

void step(Net& net, torch::optim::Optimizer& optimizer, const torch::Tensor& loss) {
  optimizer.zero_grad();
  loss.backward();
  torch::nn::utils::clip_grad_norm_(net->parameters(), 0.5);
  optimizer.step();
}

std::vector<double> expected_losses() {
  Net net = make_net();
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));
  std::vector<double> losses;
  for (int64_t i = 0; i < 4; ++i) {
    const auto loss = loss_of(net, global_batch(i));
    step(net, optimizer, loss);
    losses.push_back(loss.item<double>());
  }
  return losses;
}

std::vector<double> train(Net& net) {
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));
  std::vector<torch::Tensor> losses;
  for (int64_t i = 0; i < 4; ++i) {
    const auto loss = loss_of(net, own_batch_on_device(i));
    step(net, optimizer, loss);
    auto mean = loss.detach().clone().reshape({1});
    simulated_mesh().communicator(0)->all_reduce(mean, ReduceOp::kAvg, "loss").wait();
    losses.push_back(mean);
  }
  std::vector<double> values;
  for (const auto& loss : losses) values.push_back(loss.item<double>());
  return values;
}

class SimulatedDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    sim::enable();
    sim::configure({});
    sim::reset_races();
  }
  void TearDown() override {
    sim::set_communicator_faults({});
    sim::synchronize();
    sim::reset_races();
  }
};

TEST_F(SimulatedDevice, TrainsAsTheUnshardedModelOfTheCpu) {
  const auto expected = expected_losses();
  for (const auto layout : {BufferLayout::kRagged, BufferLayout::kPerParameter}) {
    for (const int delay_us : {0, 20}) {
      sim::set_communicator_faults({.keeps_own_stream = delay_us == 20});
      sim::configure({.delays = {.seed = static_cast<uint64_t>(world_rank()), .max_us = delay_us, .slow_factor = 4}});
      FullyShardOptions options;
      options.layout = layout;
      Net net = sharded_net(options);
      EXPECT_THAT(train(net), ::testing::Pointwise(::testing::DoubleNear(1e-5), expected));
      EXPECT_TRUE(sim::races().empty()) << sim::races().begin()->first;
    }
  }
}

TEST_F(SimulatedDevice, EveryMistakeOfACommunicatorIsFound) {
  if (world_size() == 1) GTEST_SKIP() << "one rank communicates with nobody";
  std::vector<sim::CommunicatorFaults> all;
  for (const auto kind : {CollectiveKind::kAllGather, CollectiveKind::kReduceScatter}) {
    all.push_back({.skip_start = kind, .keeps_own_stream = true});
    all.push_back({.skip_wait = kind, .keeps_own_stream = true});
  }
  for (size_t i = 0; i < all.size(); ++i) {
    Net net = sharded_net();
    sim::set_communicator_faults(all[i]);
    train(net);
    sim::synchronize();
    EXPECT_FALSE(sim::races().empty()) << "fault " << i;
    sim::set_communicator_faults({});
    sim::reset_races();
  }
}

TEST_F(SimulatedDevice, TensorsOfACollectiveAreKeptUntilItsWait) {
  if (world_size() == 1) GTEST_SKIP() << "one rank communicates with nobody";
  const torch::TensorOptions options(sim::kDevice);
  for (const bool releases_early : {false, true}) {
    sim::set_communicator_faults({.releases_early = releases_early});
    const auto output = torch::zeros({64 * world_size()}, options);
    auto work = simulated_mesh().communicator(0)->all_gather_into(output, torch::ones({64}, options), "of a temporary");
    const auto reused = torch::zeros({64}, options);
    work.wait();
    EXPECT_EQ(sim::races().empty(), !releases_early);
    sim::synchronize();
  }
}

} // namespace
} // namespace tessera::testing::simulated_device_test
