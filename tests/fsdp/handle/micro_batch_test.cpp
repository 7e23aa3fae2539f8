// Steps of several micro-batches, whose phases the program says.
#include <gtest/gtest.h>

#include <tessera/fsdp/clip_grad.h>
#include <tessera/fsdp/fsdp_module.h>
#include <tessera/fsdp/micro_batch.h>
#include <tessera/fsdp/model/sharded_module.h>

#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>

namespace tessera::testing::micro_batch_test {
namespace {

using enum MicroBatchPhase;

constexpr int64_t kMicroBatches = 4, kGroups = 4;

/// What is computed in a step, in order.
struct Order {
  std::string name;
  std::vector<MicroBatch> phases;
};

/// `ahead` forwards, then a backward after each forward, from the first micro-batch or from the last one in flight.
Order order_of(const std::string& name, int64_t ahead, bool takes_last = false) {
  Order order{name, {}};
  std::vector<int64_t> in_flight;
  for (int64_t next = 0; next < kMicroBatches || !in_flight.empty();) {
    const auto most = static_cast<size_t>(ahead);
    if (next < kMicroBatches && in_flight.size() < most) {
      order.phases.push_back({.index = next});
      in_flight.push_back(next++);
      continue;
    }
    const auto done = takes_last ? in_flight.end() - 1 : in_flight.begin();
    order.phases.push_back({.index = *done, .phase = kBackward});
    in_flight.erase(done);
  }
  order.phases.back().is_last = true;
  return order;
}

std::vector<Order> orders() {
  return {order_of("one after the other", 1), order_of("1f1b", 2), order_of("1f1b of a first stage", 3),
          order_of("gpipe", kMicroBatches), order_of("last first", kMicroBatches, /*takes_last=*/true)};
}

Net make_double_net(uint64_t seed = 0) {
  auto net = make_net(seed);
  net->to(torch::kDouble);
  return net;
}

/// Of a rank's rows, or of all ranks'.
torch::Tensor loss_of_micro_batch(Net& net, int64_t step, int64_t index, bool is_whole) {
  const auto number = 100 * step + index;
  return loss_of(net, is_whole ? global_batch(number) : own_batch(number)) / kMicroBatches;
}

/// Runs the phases. Returns the loss of the step.
double run(Net& net, const Order& order, Residency residency, int64_t step, bool splits = false) {
  std::map<int64_t, torch::Tensor> losses;
  double sum = 0;
  for (auto phase : order.phases) {
    phase.residency = residency;
    if (phase.phase == kForward) {
      const auto scope = micro_batch_scope(*net, phase);
      losses[phase.index] = loss_of_micro_batch(net, step, phase.index, /*is_whole=*/false);
      sum += losses[phase.index].item<double>();
      continue;
    }
    if (splits) {
      const auto scope = micro_batch_scope(*net, {.index = phase.index, .phase = kInputGradients, .residency = residency});
      phase.phase = kWeightGradients;
    }
    const auto scope = micro_batch_scope(*net, phase);
    losses.extract(phase.index).mapped().backward();
  }
  return sum;
}

double run_plain(Net& net, int64_t step) {
  double sum = 0;
  for (int64_t index = 0; index < kMicroBatches; ++index) {
    const auto loss = loss_of_micro_batch(net, step, index, /*is_whole=*/true);
    sum += loss.item<double>();
    loss.backward();
  }
  return sum;
}

void update(Net& net) {
  clip_grad_norm_(*net, 0.05);
  const torch::NoGradGuard no_grad;
  for (auto& parameter : net->parameters()) parameter.sub_(parameter.grad(), 0.5);
  net->zero_grad();
}

bool is_gathered(const torch::nn::Module& net) {
  for (const auto& state : fsdp(net).state()->subtree()) {
    for (const auto& group : state->groups()) {
      if (group->needs_gather() && group->is_open()) return true;
    }
  }
  return false;
}

int64_t count(CollectiveKind kind) { return process_context().count(kind).calls; }

TEST(MicroBatch, AnyOrderOfBackwardsComputesWhatOneProcessDoes) {
  for (const auto& strategy : sweep(strategies(), 4, is_default)) {
    for (const auto& order : orders()) {
      for (const auto residency : {Residency::kStage, Residency::kMicroBatch}) {
        SCOPED_TRACE(strategy.name + ", " + order.name + (residency == Residency::kStage ? ", stage" : ", micro-batch"));
        auto net = make_double_net(), plain = make_double_net();
        net->to(test_device());
        shard_model(net, strategy);
        for (int64_t step = 0; step < 3; ++step) {
          const auto loss = mean_over_ranks(torch::tensor(run(net, order, residency, step), torch::kDouble)).item<double>();
          EXPECT_NEAR(loss, run_plain(plain, step), 1e-12);
          update(net);
          update(plain);
        }
        EXPECT_LE(parameter_difference(*net, *plain), 1e-12);
      }
    }
  }
}

TEST(MicroBatch, GathersAndReducesAsTheResidencySays) {
  if (world_size() == 1) GTEST_SKIP() << "one rank gathers nothing";
  for (const auto& order : orders()) {
    for (const auto residency : {Residency::kStage, Residency::kMicroBatch}) {
      SCOPED_TRACE(order.name + (residency == Residency::kStage ? ", stage" : ", micro-batch"));
      auto net = make_net();
      net->to(test_device());
      shard_model(net, strategies().front());
      for (int64_t step = 0; step < 3; ++step) {
        const auto gathers = count(CollectiveKind::kAllGather), reductions = count(CollectiveKind::kReduceScatter);
        run(net, order, residency, step);
        EXPECT_EQ(count(CollectiveKind::kAllGather) - gathers,
                  residency == Residency::kStage ? kGroups : 2 * kMicroBatches * kGroups);
        EXPECT_EQ(count(CollectiveKind::kReduceScatter) - reductions, kGroups);
        EXPECT_FALSE(is_gathered(*net)) << "after the last phase";
        update(net);
      }
    }
  }
}

TEST(MicroBatch, FreesAtTheEndOfAScopeWhereItIsToStayNoLonger) {
  if (world_size() == 1) GTEST_SKIP() << "one rank gathers nothing";
  auto net = make_net();
  net->to(test_device());
  shard_model(net, strategies().front());
  torch::Tensor loss;
  for (const auto residency : {Residency::kMicroBatch, Residency::kStage}) {
    {
      const auto scope = micro_batch_scope(*net, {.index = residency == Residency::kStage ? 1 : 0, .residency = residency});
      loss = loss_of_micro_batch(net, 0, 0, false);
      EXPECT_TRUE(is_gathered(*net));
    }
    EXPECT_EQ(is_gathered(*net), residency == Residency::kStage);
  }
  fsdp(*net).zero_grad();
  {
    const torch::NoGradGuard no_grad; // an evaluation
    for (int64_t i = 0; i < 3; ++i) {
      {
        const auto scope = micro_batch_scope(*net, {.index = i, .is_last = i == 2});
        loss = loss_of_micro_batch(net, 0, i, false);
      }
      EXPECT_EQ(is_gathered(*net), i < 2) << i;
    }
  }
}

/// The numbers of the groups that are open.
std::vector<size_t> gathered_groups(const torch::nn::Module& net) {
  std::vector<size_t> numbers;
  for (const auto& group : fsdp(net).state()->subtree_groups()) {
    if (group->needs_gather() && group->is_open()) numbers.push_back(group->number);
  }
  return numbers;
}

TEST(MicroBatch, GathersAheadForTheNextPhaseAsInTheStepBefore) {
  if (world_size() == 1) GTEST_SKIP() << "one rank gathers nothing";
  for (const int64_t depth : {1, 0}) {
    auto net = make_net();
    net->to(test_device());
    shard_model(net, strategies().front());
    fsdp(*net).set_prefetch_depth(depth);
    const auto order = order_of("1f1b", 2);
    for (int64_t step = 0; step < 3; ++step) {
      std::map<int64_t, torch::Tensor> losses;
      for (size_t i = 0; i < order.phases.size(); ++i) {
        auto phase = order.phases[i];
        phase.residency = Residency::kMicroBatch;
        {
          const auto scope = micro_batch_scope(*net, phase);
          if (phase.phase == kForward) {
            losses[phase.index] = loss_of_micro_batch(net, step, phase.index, false);
          } else {
            losses.extract(phase.index).mapped().backward();
          }
        }
        std::vector<size_t> ahead; // the first group that a forward reads, or the last
        if (step > 0 && depth > 0 && !phase.is_last) ahead.push_back(order.phases[i + 1].phase == kForward ? 0 : kGroups - 1);
        EXPECT_EQ(gathered_groups(*net), ahead) << i;
      }
      update(net);
    }
  }
}

TEST(MicroBatch, AStepThatGoesOtherwiseIsNotForetold) {
  if (world_size() == 1) GTEST_SKIP() << "one rank gathers nothing";
  auto net = make_net(), plain = make_net();
  net->to(test_device());
  shard_model(net, strategies().front());
  const auto all = orders();
  for (size_t step = 0; step < all.size(); ++step) {
    run(net, all[step], Residency::kMicroBatch, static_cast<int64_t>(step), /*splits=*/step % 2 == 1);
    EXPECT_FALSE(is_gathered(*net)) << "after the last phase";
    run_plain(plain, static_cast<int64_t>(step));
    update(net);
    update(plain);
  }
  EXPECT_LE(parameter_difference(*net, *plain), 1e-4);
}

TEST(MicroBatch, GathersAheadWhatTheProgramSays) {
  if (world_size() == 1) GTEST_SKIP() << "one rank gathers nothing";
  auto first = make_net(1), second = make_net(2);
  for (auto* net : {&first, &second}) {
    (*net)->to(test_device());
    shard_model(*net, strategies().front());
  }
  gather_ahead(*second, kForward); // nothing is known of it
  EXPECT_FALSE(is_gathered(*second));
  const MicroBatch backward{.phase = kBackward, .is_last = true};
  for (int64_t step = 0; step < 2; ++step) {
    torch::Tensor loss;
    const auto gathers = count(CollectiveKind::kAllGather);
    {
      const auto scope = micro_batch_scope(*second, {});
      gather_ahead(*second, kBackward); // not while it runs
      loss = loss_of_micro_batch(second, step, 0, false);
    }
    gather_ahead(*second, kBackward);
    EXPECT_TRUE(is_gathered(*second));
    EXPECT_FALSE(is_gathered(*first));
    {
      const auto scope = micro_batch_scope(*second, backward);
      loss.backward();
    }
    EXPECT_EQ(count(CollectiveKind::kAllGather) - gathers, step == 0 ? kGroups : kGroups - 1); // one came before
    update(second);
    gather_ahead(*second, kForward);
    EXPECT_EQ(gathered_groups(*second), std::vector<size_t>{0});
  }
  gather_ahead(*make_net(), kForward);
  EXPECT_THROWS_WITH(gather_ahead(*(*first->blocks)[0]->as<Block>()->up, kForward), "gather_ahead");
}

TEST(MicroBatch, ReducesInWeightGradientsWhatInputGradientsLeft) {
  for (const auto residency : {Residency::kStage, Residency::kMicroBatch}) {
    auto net = make_double_net(), plain = make_double_net();
    net->to(test_device());
    shard_model(net, strategies().front());
    for (int64_t step = 0; step < 2; ++step) {
      const auto reductions = count(CollectiveKind::kReduceScatter);
      run(net, order_of("1f1b", 2), residency, step, /*splits=*/true);
      EXPECT_EQ(count(CollectiveKind::kReduceScatter) - reductions, world_size() == 1 ? 0 : kGroups);
      run_plain(plain, step);
      update(net);
      update(plain);
    }
    EXPECT_LE(parameter_difference(*net, *plain), 1e-12);
  }
}

TEST(MicroBatch, ReducesAtTheEndOfTheLastScopeWhereNoBackwardRanInIt) {
  auto net = make_double_net(), plain = make_double_net();
  net->to(test_device());
  shard_model(net, strategies().front());
  torch::Tensor loss;
  for (int64_t i = 0; i < 2; ++i) {
    const auto scope = micro_batch_scope(*net, {.index = i});
    const auto mine = loss_of_micro_batch(net, 0, i, false);
    if (i == 0) loss = mine;
  }
  {
    const auto scope = micro_batch_scope(*net, {.index = 0, .phase = kBackward});
    loss.backward();
  }
  { const auto scope = micro_batch_scope(*net, {.index = 1, .phase = kBackward, .is_last = true}); }
  loss_of_micro_batch(plain, 0, 0, true).backward();
  EXPECT_FALSE(is_gathered(*net));
  update(net);
  update(plain);
  EXPECT_LE(parameter_difference(*net, *plain), 1e-12);
}

TEST(MicroBatch, LeavesOffWhatTheSettersHaveSwitchedOff) {
  auto net = make_double_net(), plain = make_double_net();
  net->to(test_device());
  shard_model(net, strategies().front());
  fsdp(*net).set_requires_gradient_sync(false);
  const auto reductions = count(CollectiveKind::kReduceScatter);
  run(net, order_of("1f1b", 2), Residency::kStage, 0); // an accumulation over two steps
  EXPECT_EQ(count(CollectiveKind::kReduceScatter), reductions);
  EXPECT_THROWS_WITH(update(net), "was accumulated and never reduced");
  fsdp(*net).set_requires_gradient_sync(true);
  run(net, order_of("1f1b", 2), Residency::kStage, 1);
  for (int64_t step = 0; step < 2; ++step) run_plain(plain, step);
  update(net);
  update(plain);
  EXPECT_LE(parameter_difference(*net, *plain), 1e-12);
}

TEST(MicroBatch, RefusesPhasesOutOfOrder) {
  auto net = make_net();
  net->to(test_device());
  shard_model(net, strategies().front());
  const auto begin = [&](const MicroBatch& phase) { const auto scope = micro_batch_scope(*net, phase); };
  const std::string rank = " (rank " + std::to_string(world_rank()) + ")";
  EXPECT_THROWS_WITH(begin({.index = -1}),
                     ": the forward of micro-batch -1 has a negative index: they are counted from 0" + rank);
  EXPECT_THROWS_WITH(begin({.index = -1}), "micro_batch_scope of tessera::testing::NetImpl");
  EXPECT_THROWS_WITH(begin({.index = 0, .is_last = true}), "cannot be the last of a step, because its backward follows");
  begin({.index = 0});
  begin({.index = 1});
  begin({.index = 5});
  EXPECT_THROWS_WITH(begin({.index = 1}), "the forward of micro-batch 1 comes again before its backward");
  EXPECT_THROWS_WITH(begin({.index = 2, .phase = kBackward}),
                     ": the backward of micro-batch 2 has no forward before it; in flight: 0, 1, 5" + rank);
  EXPECT_THROWS_WITH(begin({.index = 1, .phase = kBackward, .is_last = true}),
                     "the backward of micro-batch 1 cannot be the last of the step while others are in flight: 0, 5");
  EXPECT_THROWS_WITH(begin({.index = 1, .phase = kWeightGradients}), "comes before its input gradients");
  EXPECT_THROWS_WITH(begin({.index = 0, .phase = kInputGradients, .is_last = true}), "because its weight gradients follow");
  begin({.index = 0, .phase = kInputGradients});
  EXPECT_THROWS_WITH(begin({.index = 0, .phase = kInputGradients}), "the input gradients of micro-batch 0 comes after");
  EXPECT_THROWS_WITH(begin({.index = 0, .phase = kBackward}), "comes after its input gradients: its weight gradients are left");
  begin({.index = 0, .phase = kWeightGradients});
  EXPECT_THROWS_WITH(begin({.index = 0, .phase = kWeightGradients}), "has no forward before it; in flight: 1, 5");
  {
    const auto scope = micro_batch_scope(*net, {.index = 1, .phase = kBackward});
    EXPECT_THROWS_WITH(begin({.index = 5, .phase = kBackward}), "begins inside the scope of the backward of micro-batch 1");
  }
  fsdp(*net).zero_grad();
  EXPECT_THROWS_WITH(begin({.index = 5, .phase = kBackward}), "in flight: none");
  EXPECT_THROWS_WITH(const auto scope = micro_batch_scope(*net->blocks[0], {}), "is a part of the model");
}

TEST(MicroBatch, AStepThatAnExceptionEndedCanBeRunAgain) {
  auto net = make_double_net(), plain = make_double_net();
  net->to(test_device());
  shard_model(net, strategies().front());
  const auto forward = [&](int64_t index, bool fails) {
    const auto scope = micro_batch_scope(*net, {.index = index});
    const auto x =
        net->blocks[0]->as<Block>()->forward(torch::ones({2, 18}, torch::TensorOptions(test_device()).dtype(torch::kDouble)));
    if (fails) throw std::runtime_error("a forward fails");
    return x.sum();
  };
  for (int64_t step = 0; step < 2; ++step) {
    EXPECT_THROWS_WITH(forward(0, true), "a forward fails");
    auto first = forward(0, false), second = forward(1, false);
    second.register_hook([](const torch::Tensor& gradient) -> torch::Tensor {
      throw std::runtime_error("a backward fails");
      return gradient;
    });
    const auto backward = [&](int64_t index, const torch::Tensor& loss) {
      const auto scope = micro_batch_scope(*net, {.index = index, .phase = kBackward});
      loss.backward();
    };
    backward(0, first);
    EXPECT_THROWS_WITH(backward(1, second), "a backward fails");
    EXPECT_THROWS_WITH(backward(1, second), "the backward of micro-batch 1 has no forward before it; in flight: none");
    fsdp(*net).zero_grad();
    run(net, order_of("1f1b", 2), Residency::kMicroBatch, step);
    run_plain(plain, step);
    update(net);
    update(plain);
  }
  EXPECT_LE(parameter_difference(*net, *plain), 1e-12);
}

/// Two models of one module that is not sharded, and a third that nothing shards.
TEST(MicroBatch, ReachesAllModelsInAModule) {
  auto left = make_double_net(1), right = make_double_net(2), plain_left = make_double_net(1), plain_right = make_double_net(2);
  torch::nn::ModuleList both;
  for (auto* net : {&left, &right}) {
    (*net)->to(test_device());
    shard_model(*net, strategies().front());
    both->push_back(*net);
  }
  const auto reductions = count(CollectiveKind::kReduceScatter);
  for (int64_t i = 0; i < kMicroBatches; ++i) {
    torch::Tensor loss;
    {
      const auto scope = micro_batch_scope(*both, {.index = i});
      loss = loss_of_micro_batch(left, 0, i, false) + loss_of_micro_batch(right, 0, i, false);
    }
    const auto scope = micro_batch_scope(*both, {.index = i, .phase = kBackward, .is_last = i + 1 == kMicroBatches});
    loss.backward();
  }
  EXPECT_EQ(count(CollectiveKind::kReduceScatter) - reductions, world_size() == 1 ? 0 : 2 * kGroups);
  for (auto [net, plain] : {std::pair{&left, &plain_left}, std::pair{&right, &plain_right}}) {
    run_plain(*plain, 0);
    update(*net);
    update(*plain);
    EXPECT_LE(parameter_difference(**net, **plain), 1e-12);
  }
  auto nothing = make_double_net();
  const auto scope = micro_batch_scope(*nothing, {.index = 3, .phase = kWeightGradients, .is_last = true});
}

} // namespace
} // namespace tessera::testing::micro_batch_test
