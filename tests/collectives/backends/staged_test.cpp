// Collectives of a device through the host, on the simulated device: the results of the CPU's, and no race.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/collectives/backends/backend.h>
#include <tessera/collectives/backends/staged/staged_communicator.h>
#include <tessera/collectives/process_context.h>
#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/simulated_device/simulated_device.h>
#include <torch/torch.h>

#include <numeric>
#include <stdexcept>
#include <thread>

namespace tessera::testing::staged_test {
namespace {

CommunicatorPtr make_staged(const internal::GroupDescription& group) {
  return internal::make_staged_communicator(internal::make_backend_communicator(group, at::kCPU), sim::kDevice);
}

class Staged : public ::testing::Test {
 protected:
  void SetUp() override {
    sim::enable();
    internal::register_backend(sim::kDeviceType, {&make_staged, [](int64_t) { return sim::kDevice; }});
    sim::configure({.delays = {.seed = static_cast<uint64_t>(world_rank()), .max_us = 20}});
    sim::reset_races();
  }
  void TearDown() override {
    sim::synchronize();
    for (const auto& [race, times] : sim::races()) ADD_FAILURE() << times << " times: " << race;
    sim::configure({});
  }
  static CommunicatorPtr group(at::DeviceType type, const std::string& purpose = "staged_test") {
    std::vector<int64_t> ranks(world_size());
    std::iota(ranks.begin(), ranks.end(), 0);
    return process_context().communicator(ranks, type, purpose);
  }
};

/// What a collective makes of a rank's tensor: on the host, and through it.
struct Collective {
  std::string name;
  std::function<at::Tensor(Communicator&, const at::Tensor&)> run;
};

std::vector<Collective> collectives() {
  return {
      {"all_gather_into",
       [](Communicator& group, const at::Tensor& input) {
         auto output = torch::empty({group.size() * input.numel()}, input.options());
         group.all_gather_into(output, input, "gather").wait();
         return output;
       }},
      {"reduce_scatter",
       [](Communicator& group, const at::Tensor& input) {
         auto output = torch::empty(input.sizes(), input.options());
         group.reduce_scatter(output, torch::cat(std::vector<at::Tensor>(group.size(), input)), ReduceOp::kSum, "reduce").wait();
         return output;
       }},
      {"all_reduce",
       [](Communicator& group, const at::Tensor& input) {
         auto tensor = input.clone();
         group.all_reduce(tensor, ReduceOp::kMax, "reduce").wait();
         return tensor;
       }},
      {"all_to_all",
       [](Communicator& group, const at::Tensor& input) {
         auto output = torch::empty({group.size() * input.numel()}, input.options());
         group.all_to_all(output, torch::cat(std::vector<at::Tensor>(group.size(), input)), {}, {}, "exchange").wait();
         return output;
       }},
      {"broadcast",
       [](Communicator& group, const at::Tensor& input) {
         auto tensor = input.clone();
         group.broadcast(tensor, group.size() - 1, "broadcast").wait();
         return tensor;
       }},
  };
}

TEST_F(Staged, GivesTheResultsOfTheHost) {
  if (world_size() == 1) GTEST_SKIP() << "one rank communicates with nobody";
  for (const auto& collective : collectives()) {
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kLong}) {
      for (const int64_t numel : {0, 1, 7, 1000}) {
        SCOPED_TRACE(c10::str(collective.name, " ", dtype, " ", numel));
        const auto input = (torch::arange(numel) * 3 + world_rank()).remainder(7).to(dtype);
        const auto expected = collective.run(*group(at::kCPU), input);
        EXPECT_TRUE(torch::equal(collective.run(*group(sim::kDeviceType), input.to(sim::kDevice)).cpu(), expected));
      }
    }
  }
}

TEST_F(Staged, RunsSeveralAtOnceInOrder) {
  if (world_size() == 1) GTEST_SKIP() << "one rank communicates with nobody";
  const auto staged = group(sim::kDeviceType);
  std::vector<at::Tensor> tensors;
  std::vector<Work> works;
  for (int64_t i = 0; i < 5; ++i) {
    tensors.push_back(torch::full({100}, i, sim::kDevice));
    works.push_back(staged->all_reduce(tensors.back(), ReduceOp::kSum, "reduce"));
  }
  auto together = torch::ones({3}, sim::kDevice);
  staged->coalesced([&] { staged->all_reduce(together, ReduceOp::kSum, "together"); }).wait();
  EXPECT_TRUE(torch::equal(together.cpu(), torch::full({3}, static_cast<double>(world_size())).to(at::kFloat)));
  for (int64_t i = 5; --i >= 0;) {
    works[i].wait();
    EXPECT_TRUE(torch::equal(tensors[i].cpu(), torch::full({100}, i * world_size())));
  }
  staged->barrier("end");
}

TEST_F(Staged, OutputsMayBeParameters) {
  const auto parameter = torch::ones({4}, torch::TensorOptions(sim::kDevice).requires_grad(true));
  group(sim::kDeviceType)->all_reduce(parameter, ReduceOp::kSum, "sum").wait();
  EXPECT_EQ(parameter.detach().sum().item<double>(), 4.0 * world_size());
}

TEST_F(Staged, TakesTensorsOfInferenceMode) {
  const auto ranks = static_cast<double>(world_size());
  const c10::InferenceMode inference;
  auto tensor = torch::ones({4}, sim::kDevice);
  group(sim::kDeviceType)->all_reduce(tensor, ReduceOp::kSum, "sum").wait();
  EXPECT_EQ(tensor.sum().item<double>(), 4 * ranks);
}

/// Each rank sends to the next one, whichever of the two calls it makes first.
TEST_F(Staged, MessagesGoAround) {
  if (world_size() == 1) GTEST_SKIP() << "one rank communicates with nobody";
  const auto staged = group(sim::kDeviceType);
  const int size = staged->size(), next = (staged->rank() + 1) % size, previous = (staged->rank() + size - 1) % size;
  for (const bool sends_first : {true, false}) {
    for (const bool is_coalesced : {true, false}) {
      SCOPED_TRACE(c10::str(sends_first, is_coalesced));
      const auto sent = torch::full({100}, static_cast<double>(world_rank()), sim::kDevice);
      auto received = torch::empty({100}, sim::kDevice), sum = torch::ones({3}, sim::kDevice);
      std::vector<Work> works;
      const auto exchange = [&] {
        if (sends_first) works.push_back(staged->send(sent, next, "around"));
        works.push_back(staged->receive(received, previous, "around"));
        if (!sends_first) works.push_back(staged->send(sent, next, "around"));
        works.push_back(staged->all_reduce(sum, ReduceOp::kSum, "after it"));
      };
      if (is_coalesced) {
        staged->coalesced(exchange).wait();
      } else {
        exchange();
        for (auto& work : works) work.wait();
      }
      EXPECT_TRUE(torch::equal(received.cpu(), torch::full({100}, static_cast<double>(previous))));
      EXPECT_TRUE(torch::equal(sum.cpu(), torch::full({3}, static_cast<double>(size))));
    }
  }
}

/// Each rank sends one message only when it has another, which it waits for behind the first.
TEST_F(Staged, AMessageThatWaitsHoldsBackNoOther) {
  const auto staged = group(sim::kDeviceType);
  const int size = staged->size(), next = (staged->rank() + 1) % size, previous = (staged->rank() + size - 1) % size;
  if (size < 3) GTEST_SKIP() << "messages from one rank come in order";
  const auto own = torch::full({100}, static_cast<double>(world_rank()), sim::kDevice);
  auto forward = torch::empty({100}, sim::kDevice), back = torch::empty({100}, sim::kDevice);
  auto back_comes = staged->receive(back, next, "back");
  auto forward_comes = staged->receive(forward, previous, "forward");
  auto forward_goes = staged->send(own, next, "forward");
  forward_comes.wait();
  auto back_goes = staged->send(own, previous, "back");
  for (auto* work : {&back_comes, &forward_goes, &back_goes}) work->wait();
  EXPECT_TRUE(torch::equal(forward.cpu(), torch::full({100}, static_cast<double>(previous))));
  EXPECT_TRUE(torch::equal(back.cpu(), torch::full({100}, static_cast<double>(next))));
}

TEST_F(Staged, ItsEndEndsWhatWaits) {
  if (world_size() == 1) GTEST_SKIP() << "one rank communicates with nobody";
  const auto& ranks = group(at::kCPU)->ranks();
  auto staged = internal::make_staged_communicator(process_context().communicator(ranks, at::kCPU, "that ends"), sim::kDevice);
  auto tensor = torch::empty({100}, sim::kDevice);
  auto work = staged->receive(tensor, (staged->rank() + 1) % staged->size(), "never sent");
  staged.reset();
  EXPECT_THROWS_WITH(work.wait(), "the process group was destroyed"); // which comes before the timeout
}

TEST_F(Staged, ErrorsOfCoalescedCallsAreThoseOfTheirWork) {
  if (world_size() == 1) GTEST_SKIP() << "one rank communicates with nobody";
  const auto staged = group(sim::kDeviceType);
  auto tensor = torch::ones({1 + world_rank()}, sim::kDevice);
  auto work = staged->coalesced([&] { staged->all_reduce(tensor, ReduceOp::kSum, "of different sizes"); });
  EXPECT_THROWS_WITH(work.wait(), "of different sizes");
}

// The thread that holds a call's tensors until the device has done with them finds the error of another kernel.
TEST_F(Staged, AnErrorOfTheDeviceAfterACallDoesNotEndTheProcess) {
  if (world_size() == 1) GTEST_SKIP() << "one rank communicates with nobody";
  const auto on_host = group(at::kCPU, "device error"), host = group(at::kCPU);
  const auto staged = internal::make_staged_communicator(on_host, sim::kDevice);
  const auto begun = [&] { return on_host->counters().get(CollectiveKind::kAllReduce).calls; };
  auto tensor = torch::ones({3}, sim::kDevice);
  Work work;
  if (world_rank() == 0) {
    work = staged->all_reduce(tensor, ReduceOp::kSum, "sum");
    while (begun() == 0) std::this_thread::yield(); // until its copy to the host is done
    const auto other = sim::new_stream("other");
    sim::launch(other, "a kernel that fails", {}, {}, [] { throw std::runtime_error("out of luck"); });
    while (!other.query()) std::this_thread::yield();
  }
  host->barrier("the kernel has failed");
  if (world_rank() != 0) work = staged->all_reduce(tensor, ReduceOp::kSum, "sum");
  work.wait();
  staged->barrier("all have let go of the tensors");
  EXPECT_TRUE(torch::equal(tensor.cpu(), torch::full({3}, static_cast<double>(world_size()))));
}

TEST_F(Staged, AModelTrainsAsOnTheCpu) {
  const auto train = [](at::DeviceType type) {
    mesh_device_type = type;
    Net net = make_net();
    shard_model(net, strategies()[0]);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    std::vector<double> losses;
    for (int64_t i = 0; i < 3; ++i) {
      optimizer.zero_grad();
      const auto loss = loss_of(net, own_batch(i).to(world_mesh().device()));
      loss.backward();
      optimizer.step();
      losses.push_back(loss.item<double>());
    }
    mesh_device_type = torch::kCPU;
    return losses;
  };
  EXPECT_THAT(train(sim::kDeviceType), ::testing::Pointwise(::testing::DoubleNear(1e-5), train(torch::kCPU)));
}

TEST_F(Staged, ItsWaitsAreTheHosts) {
  mesh_device_type = sim::kDeviceType;
  Net net = make_net();
  shard_model(net, strategies()[0]);
  mesh_device_type = torch::kCPU;
  fsdp(*net).set_reporting(true);
  loss_of(net, global_batch(0).to(sim::kDevice)).backward();
  const auto report = fsdp(*net).report();
  for (const auto& group : report.groups) EXPECT_FALSE(group.waits_on_streams) << group.name;
  EXPECT_EQ(report.exposed_seconds() > 0, world_size() > 1);
}

/// Ranks read different parameters of its groups.
struct Uneven : torch::nn::Module {
  torch::Tensor loss(const torch::Tensor& x, int64_t rank) {
    const auto h = a(x).tanh();
    if (rank % 2 == 0) return head(b(h)).square().mean();
    return (h.mm(b->weight.t()).mean() + head->bias).square().sum();
  }
  torch::nn::Linear a = register_module("a", torch::nn::Linear(6, 6)), b = register_module("b", torch::nn::Linear(6, 6)),
                    head = register_module("head", torch::nn::Linear(6, 1));
};

// The host of one rank must not wait for a reduction before it calls the gather that another rank's host waits for.
TEST_F(Staged, RanksMayReadDifferentParameters) {
  const auto train = [](at::DeviceType type, size_t index) {
    mesh_device_type = type;
    const auto strategy = strategies()[index];
    const auto mesh = strategy.mesh();
    torch::manual_seed(0);
    Uneven model;
    const auto wrap = [&](torch::nn::Module& module) {
      strategy.replicates ? replicate(module, mesh, strategy.options) : fully_shard(module, mesh, strategy.options);
    };
    for (const auto& layer : model.children()) wrap(*layer);
    wrap(model);
    torch::optim::SGD optimizer(model.parameters(), 0.1);
    std::vector<double> losses;
    for (int64_t i = 0; i < 3; ++i) {
      optimizer.zero_grad();
      const auto loss =
          model.loss(torch::full({2, 6}, 0.1 * static_cast<double>(i + world_rank())).to(mesh.device()), world_rank());
      loss.backward();
      optimizer.step();
      losses.push_back(loss.item<double>());
    }
    mesh_device_type = torch::kCPU;
    return losses;
  };
  for (size_t i = 0; i < strategies().size(); ++i) {
    SCOPED_TRACE(strategies()[i].name);
    EXPECT_THAT(train(sim::kDeviceType, i), ::testing::Pointwise(::testing::DoubleNear(1e-5), train(torch::kCPU, i)));
  }
}

} // namespace
} // namespace tessera::testing::staged_test
