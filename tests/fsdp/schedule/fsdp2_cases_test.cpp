// Cases of FSDP2's own tests that no other file has; docs/fsdp2_tests.md says which file has which.
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <tessera/activations/recompute.h>
#include <tessera/checkpoint/state_dict.h>
#include <tessera/fsdp/call.h>
#include <tessera/fsdp/model/sharded_module.h>

#include <tessera/tests/fsdp/twin.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>

namespace tessera::testing::fsdp2_cases_test {
namespace {

using torch::Tensor;

Tensor rows_of_rank(int64_t step) { return own_batch(step); }

Tensor run_blocks(Net& net, Tensor x, const std::function<void()>& between) {
  for (const auto& block : *net->blocks) {
    x = block->as<Block>()->forward(x);
    between();
  }
  return x;
}

int64_t calls_of(CollectiveKind kind) { return process_context().count(kind).calls; }
int64_t all_gathers() { return calls_of(CollectiveKind::kAllGather); }

// test_fully_shard_comm: test_manual_reshard_with_reshard_after_forward_false, test_set_reshard_after_forward
TEST(Fsdp2Cases, ReshardingByHandAndBySetterIsCounted) {
  if (world_size() == 1) GTEST_SKIP() << "one rank gathers nothing";
  Net net = make_net();
  shard_model(net, {"full", world_mesh, {.reshard_after_forward = false}});
  auto root = fsdp(*net);
  const auto gathers_of_a_step = [&](const std::function<void()>& between) {
    const auto before = all_gathers();
    const auto loss = loss_of(net, rows_of_rank(0));
    between();
    loss.backward();
    return all_gathers() - before;
  };
  for (int step = 0; step < 2; ++step) EXPECT_EQ(gathers_of_a_step([] {}), 4);
  EXPECT_EQ(gathers_of_a_step([&] {
              for (const auto& block : *net->blocks) fsdp(*block).reshard();
            }),
            7)
      << "each block again in backward";
  root.set_reshard_after_forward(true, /*recurse=*/false);
  EXPECT_EQ(gathers_of_a_step([] {}), 4) << "the root alone, which the backward needs at once";
  root.set_reshard_after_forward(true);
  EXPECT_EQ(gathers_of_a_step([] {}), 6) << "but for the root and the last block, whose backward comes first";
  root.set_reshard_after_forward(false);
  EXPECT_EQ(gathers_of_a_step([] {}), 4);
}

/// Also between a forward, which has kept parts among neighbours, and its backward.
TEST(Fsdp2Cases, TheSetterForgetsANumberOfRanks) {
  if (world_size() != 4) GTEST_SKIP() << "two neighbours among more ranks";
  for (const bool reshards : {true, false}) {
    Net net = make_net(), other = make_net();
    shard_model(net, {"among neighbours", world_mesh, {.reshard_after_forward = 2}});
    shard_model(other, {"full"});
    const auto loss = loss_of(net, rows_of_rank(0));
    fsdp(*net).set_reshard_after_forward(reshards);
    for (const auto& block : *net->blocks) EXPECT_FALSE(fsdp(*block).state()->group()->stages().has_after_forward());
    loss.backward();
    loss_of(other, rows_of_rank(0)).backward();
    const auto expected = other->named_parameters();
    for (const auto& item : net->named_parameters())
      EXPECT_TENSORS_EQUAL(full(item.value().grad()), full(expected[item.key()].grad()));
  }
}

/// A block's part stays when the forward around it ends too.
TEST(Fsdp2Cases, TheEndOfTheRootsForwardKeepsWhatNeighboursHave) {
  if (world_size() != 4) GTEST_SKIP() << "two neighbours among more ranks";
  Net net = make_net();
  shard_model(net, {"among neighbours", world_mesh, {.reshard_after_forward = 2}});
  const auto loss = call(net, rows_of_rank(0)).square().mean();
  const auto& among_all = fsdp(*net).state()->group()->stages().inner_gather().communicator;
  const auto before = among_all->counters().get(CollectiveKind::kAllGather).calls;
  loss.backward();
  EXPECT_EQ(among_all->counters().get(CollectiveKind::kAllGather).calls, before);
}

// test_fully_shard_training: test_train_parity_multi_group, with its delays
TEST(Fsdp2Cases, RanksThatAreLateInForwardAndBackwardTrain) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Net plain = make_net(), net = make_net();
    shard_model(net, strategy);
    const auto sleep = [step = 0]() mutable {
      if (++step % 3 == world_rank() % 3) std::this_thread::sleep_for(std::chrono::milliseconds(3));
    };
    const auto loss = [](Net& model, const Tensor& tokens, const std::function<void()>& between) {
      auto x = run_blocks(model, model->embedded(tokens), between);
      x.register_hook([=](const Tensor&) { between(); });
      return torch::matmul(model->norm(x), model->embed->weight.t()).square().mean();
    };
    for (int64_t step = 0; step < 2; ++step) {
      loss(plain, global_batch(step), [] {}).backward();
      loss(net, rows_of_rank(step), sleep).backward();
    }
    expect_equal_gradients(net, plain);
  }
}

/// Which modules of a model accumulate without communication.
enum class Which { kAll, kRootOnly, kSomeBlocks };

/// Of the model's four groups, those that reduce in a micro-batch before the last.
int64_t reductions_of(Which which) { return which == Which::kAll ? 0 : which == Which::kRootOnly ? 3 : 2; }

// test_fully_shard_training: test_gradient_accumulation
TEST(Fsdp2Cases, SomeModulesAccumulateWithoutCommunication) {
  for (const auto& strategy : sweep(strategies(), 6, is_default)) { // of the default the reductions are counted
    for (const auto which : {Which::kAll, Which::kRootOnly, Which::kSomeBlocks}) {
      for (const bool reshards : {true, false}) {
        SCOPED_TRACE(c10::str(strategy.name, ", which ", static_cast<int>(which), reshards ? "" : ", kept after backward"));
        Net plain = make_net(), net = make_net();
        shard_model(net, strategy);
        auto root = fsdp(*net);
        for (int64_t micro = 0; micro < 3; ++micro) {
          const bool is_last = micro == 2;
          if (which == Which::kSomeBlocks) {
            for (size_t i = 0; i < 2; ++i) fsdp(*(*net->blocks)[i]).set_requires_gradient_sync(is_last);
          } else {
            root.set_requires_gradient_sync(is_last, /*recurse=*/which == Which::kAll);
          }
          root.set_is_last_backward(is_last);
          root.set_reshard_after_backward(is_last || reshards);
          loss_of(plain, global_batch(micro)).backward();
          const auto before = calls_of(CollectiveKind::kReduceScatter);
          loss_of(net, rows_of_rank(micro)).backward();
          if (world_size() > 1 && strategy.name.starts_with("full"))
            EXPECT_EQ(calls_of(CollectiveKind::kReduceScatter) - before, is_last ? 4 : reductions_of(which)) << micro;
        }
        expect_equal_gradients(net, plain);
      }
    }
  }
}

// test_fully_shard_comm: test_set_modules_to_backward_prefetch_inside_ac
TEST(Fsdp2Cases, PrefetchListsServeBlocksThatAreRecomputed) {
  if (world_size() == 1) GTEST_SKIP() << "one rank gathers nothing";
  const auto loss = [](Net& net, const Tensor& tokens) {
    auto x = net->embedded(tokens);
    for (const auto& block : *net->blocks) x = recompute(Block(std::dynamic_pointer_cast<BlockImpl>(block)), x);
    return torch::matmul(net->norm(x), net->embed->weight.t()).square().mean();
  };
  Net plain = make_net();
  loss(plain, global_batch(0)).backward();
  for (const bool with_lists : {false, true}) {
    Net net = make_net();
    shard_model(net, {"full", world_mesh});
    const auto& blocks = *net->blocks;
    for (size_t i = 1; with_lists && i < blocks.size(); ++i) {
      fsdp(*blocks[i]).set_modules_to_backward_prefetch({fsdp(*blocks[i - 1])});
      fsdp(*blocks[i - 1]).set_modules_to_forward_prefetch({fsdp(*blocks[i])});
    }
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      const auto before = all_gathers();
      loss(net, rows_of_rank(0)).backward();
      EXPECT_EQ(all_gathers() - before, 6) << "four in forward, and each block but the last once again in step " << step;
      expect_equal_gradients(net, plain);
    }
  }
}

// test_fully_shard_training: test_1f1b_microbatching
TEST(Fsdp2Cases, OneForwardOneBackward) {
  constexpr int64_t kMicroBatches = 4, kInFlight = 2;
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Net plain = make_net(), net = make_net();
    shard_model(net, strategy);
    auto root = fsdp(*net);
    std::vector<Tensor> losses;
    for (int64_t turn = 0; turn < kMicroBatches + kInFlight; ++turn) {
      if (turn < kMicroBatches) {
        loss_of(plain, global_batch(turn)).backward();
        losses.push_back(loss_of(net, rows_of_rank(turn)));
      }
      if (turn < kInFlight) continue;
      const bool is_last = turn == kMicroBatches + kInFlight - 1;
      root.set_requires_gradient_sync(is_last);
      root.set_is_last_backward(is_last);
      root.set_reshard_after_backward(is_last);
      losses[static_cast<size_t>(turn - kInFlight)].backward();
    }
    expect_equal_gradients(net, plain);
  }
}

// test_fully_shard_frozen: test_multi_forward_mixed_requires_grad
TEST(Fsdp2Cases, AFrozenBlockIsCalledWithoutGradModeAmidATrainingForward) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    const auto loss = [](Net& net, const Tensor& tokens) {
      auto first = (*net->blocks)[0]->as<Block>();
      auto x = net->embedded(tokens);
      Tensor target;
      {
        const torch::NoGradGuard no_grad;
        target = first->forward(run_blocks(net, x, [] {}));
      }
      return (run_blocks(net, first->forward(x), [] {}) - target).square().mean();
    };
    Net plain = make_net(), net = make_net();
    for (auto* model : {&plain, &net}) {
      for (auto& parameter : (*(*model)->blocks)[0]->parameters()) parameter.requires_grad_(false);
    }
    shard_model(net, strategy);
    for (int64_t step = 0; step < 2; ++step) {
      loss(plain, global_batch(step)).backward();
      loss(net, rows_of_rank(step)).backward();
    }
    expect_equal_gradients(net, plain);
  }
}

// test_fully_shard_ignore_params: test_ddp_A_fsdp_B_ddp_C; test_fully_shard_init: managed modules of both
TEST(Fsdp2Cases, AShardedBlockBetweenReplicatedOnes) {
  Net plain = make_net(), net = make_net();
  replicate(*(*net->blocks)[0], world_mesh());
  fully_shard(*(*net->blocks)[1], world_mesh());
  replicate(*net, world_mesh());
  for (int64_t step = 0; step < 2; ++step) {
    loss_of(plain, global_batch(step)).backward();
    loss_of(net, rows_of_rank(step)).backward();
  }
  expect_equal_gradients(net, plain);
  EXPECT_EQ(fsdp(*net).parameter_names().size() + fsdp(*(*net->blocks)[0]).parameter_names().size() +
                fsdp(*(*net->blocks)[1]).parameter_names().size(),
            net->parameters().size());
}

// test_fully_shard_state: test_fully_shard_unsupported_module_cls, which is taken here
TEST(Fsdp2Cases, AModuleListTrains) {
  Net plain = make_net(), net = make_net();
  fully_shard(*net->blocks, world_mesh());
  fully_shard(*net, world_mesh());
  EXPECT_EQ(fsdp(*net->blocks).parameter_names().size(), net->blocks->parameters().size());
  loss_of(plain, global_batch(0)).backward();
  loss_of(net, rows_of_rank(0)).backward();
  expect_equal_gradients(net, plain);
}

// test_fully_shard_mixed_precision: test_reduce_dtype_after_frozen_first_forward
TEST(Fsdp2Cases, TheReduceDtypeServesWhatIsUnfrozenAfterTheFirstForward) {
  const auto gradient_of = [](bool frozen_first) {
    torch::manual_seed(1);
    torch::nn::Linear linear(64, 3);
    FullyShardOptions options;
    options.mixed_precision = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
    fully_shard(linear, world_mesh(), options);
    const auto train = [&](bool trains) {
      for (auto& parameter : linear->parameters()) parameter.requires_grad_(trains);
      return linear(torch::full({4, 64}, 0.1 + 0.37 * static_cast<double>(world_rank()), test_device()))
          .to(torch::kFloat)
          .square()
          .mean();
    };
    if (frozen_first) train(false);
    train(true).backward();
    EXPECT_EQ(linear->weight.grad().scalar_type(), torch::kFloat);
    return full(linear->weight.grad());
  };
  EXPECT_TENSORS_EQUAL(gradient_of(true), gradient_of(false));
}

// test_fully_shard_comm: test_unshard_no_param_group, test_unshard_without_lazy_init
TEST(Fsdp2Cases, UnshardBeforeAnyForwardAndOfAModuleWithoutParametersOfItsOwn) {
  torch::manual_seed(0);
  torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
  for (const auto& layer : *net) fully_shard(*layer.ptr(), world_mesh());
  auto root = fully_shard(net, world_mesh());
  root.unshard();
  root.unshard_async().wait();
  EXPECT_EQ(root.unsharded_bytes(), 0);
  auto first = fsdp(*net[0]);
  first.unshard();
  if (world_size() > 1) EXPECT_GT(first.unsharded_bytes(), 0);
  const auto before = all_gathers();
  net[0]->as<torch::nn::Linear>()->forward(torch::ones({1, 4}, test_device()));
  EXPECT_EQ(all_gathers() - before, world_size() > 1 ? 1 : 0) << "the next one's alone";
  root.reshard();
}

// test_fully_shard_state_dict: test_cached_state_dict
TEST(Fsdp2Cases, AStateDictFollowsTheSteps) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Net net = make_net();
    shard_model(net, strategy);
    auto state = state_dict(*net);
    torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));
    loss_of(net, rows_of_rank(0)).backward();
    optimizer.step();
    for (const auto& item : net->named_parameters()) EXPECT_TENSORS_EQUAL(full(state.tensor(item.key())), full(item.value()));
  }
}

} // namespace
} // namespace tessera::testing::fsdp2_cases_test
