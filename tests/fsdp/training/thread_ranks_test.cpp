#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/checkpointer.h>
#include <tessera/checkpoint/state_dict.h>
#include <tessera/collectives/run_ranks.h>
#include <tessera/fsdp/clip_grad.h>

#include <gtest/gtest.h>

#include <mutex>

#include <tessera/tests/fsdp/twin.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/temporary_folder.h>

namespace tessera::testing::thread_ranks_test {
namespace {

constexpr int64_t kSteps = 3;

// The threads of a process have one random generator.
Net make_same_net() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  return make_net();
}

/// The batches are drawn before there are threads.
Steps steps_of_threads() {
  std::vector<torch::Tensor> batches;
  for (int64_t step = 0; step < kSteps; ++step) batches.push_back(global_batch(step));
  return {.count = kSteps, .batch = [batches](int64_t step) { return batches[static_cast<size_t>(step)]; }};
}

TEST(ThreadRanks, EveryStrategyMatchesTheUnshardedModel) {
  const auto steps = steps_of_threads();
  Net plain = make_net();
  const auto expected = train(plain, steps);
  for (const int ranks : {1, 2, 3, 4}) {
    SCOPED_TRACE(ranks);
    run_ranks_as_threads(ranks, [&] {
      for (const auto& strategy : strategies()) {
        SCOPED_TRACE(strategy.name);
        auto net = make_same_net();
        shard_model(net, strategy);
        expect_equal_losses(train(net, steps), expected);
        EXPECT_LT(parameter_difference(*net, *plain), kSumTolerance);
      }
    });
  }
}

TEST(ThreadRanks, DTensorsOnAMeshOfTwoByTwo) {
  const auto a = torch::randn({8, 6}), b = torch::randn({6, 4});
  run_ranks_as_threads(4, [&] {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"rows", "columns"});
    const auto left = distribute_tensor(a, mesh, {Shard{0}, Replicate{}}),
               right = distribute_tensor(b, mesh, {Replicate{}, Shard{1}});
    EXPECT_TENSORS_CLOSE(DTensor(torch::mm(left, right)).full_tensor(), torch::mm(a, b), 1e-5, 1e-6);
    EXPECT_TENSORS_CLOSE(DTensor(left.sum(0)).full_tensor(), a.sum(0), 1e-5, 1e-6);
    const auto moved = DTensor(left).redistribute({Shard{1}, Shard{0}});
    EXPECT_TENSORS_EQUAL(moved.full_tensor(), a);
  });
}

TEST(ThreadRanks, ACheckpointOfFourIsLoadedByTwo) {
  const TemporaryFolder folder;
  const auto steps = steps_of_threads();
  const auto save_to = (folder.path() / "now").string(), save_later_to = (folder.path() / "later").string();
  Net plain = make_net();
  train(plain, steps);
  run_ranks_as_threads(4, [&] {
    auto net = make_same_net();
    shard_model(net, strategies().front());
    train(net, steps);
    checkpoint::save(state_dict(*net), save_to);
    checkpoint::Checkpointer background;
    background.save(state_dict(*net), save_later_to);
    background.wait();
  });
  run_ranks_as_threads(2, [&] {
    for (const auto& path : {save_to, save_later_to}) {
      auto net = make_same_net();
      shard_model(net, strategies().front());
      auto state = state_dict(*net);
      checkpoint::load(state, path);
      load_state_dict(*net, state);
      EXPECT_LT(parameter_difference(*net, *plain), kSumTolerance);
    }
  });
}

// The others wait for its gathers, in their forwards and backwards.
TEST(ThreadRanks, ARankThatThrowsInItsBackwardEndsTheOthers) {
  const auto tokens = global_batch(0);
  const auto program = [&] {
    auto net = make_same_net();
    shard_model(net, strategies().front());
    const auto loss = loss_of(net, part_of(tokens, world_rank(), world_size()));
    if (world_rank() == 1) loss.register_hook([](const torch::Tensor&) -> torch::Tensor { TORCH_CHECK(false, "a bad batch"); });
    loss.backward();
    mean_over_ranks(loss);
  };
  EXPECT_THROWS_WITH(run_ranks_as_threads(3, program), "run_ranks_as_threads: rank 1 of 3 threw: a bad batch");
}

} // namespace
} // namespace tessera::testing::thread_ranks_test
