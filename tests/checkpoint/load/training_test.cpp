// Sharded models and their optimizers, saved and loaded under every strategy.
#include <gtest/gtest.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/formats/index.h>
#include <torch/torch.h>

#include <tessera/tests/checkpoint/sharded_training.h>
#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>

namespace tessera::checkpoint::training_test {
namespace {

using testing::expect_same;
using testing::shard;
using testing::SharedFolder;
using testing::TrainedModel;
using testing::Training;

TEST(TrainingCheckpoint, EveryStrategyLoadsIntoEveryOther) {
  const SharedFolder folder;
  const auto all = testing::strategies(process_context().world_size());
  std::vector<std::pair<std::string, std::string>> pairs;
  for (const auto& from : all) {
    for (const auto& to : all) pairs.emplace_back(from, to);
  }
  for (const auto& [from, to] :
       testing::sweep(pairs, 5, [](const auto& pair) { return testing::are_default(pair.first, pair.second); })) {
    SCOPED_TRACE(from + " to " + to);
    const auto path = folder.path() / (from + " to " + to);
    Training saved(from, 1), loaded(to, 2), again(from, 3);
    for (int64_t step = 0; step < 2; ++step) saved.step(step);
    save(saved.state(), path);
    load(loaded.state(), path);
    load(again.state(), path);
    expect_same(loaded.state(), saved.state());
    const auto expected = saved.step(2);
    EXPECT_NEAR(loaded.step(2), expected, 1e-5);
    EXPECT_EQ(again.step(2), expected);
  }
}

TEST(TrainingCheckpoint, LoadingIsSeenByParametersThatAreGathered) {
  const SharedFolder folder;
  for (const auto& strategy : testing::strategies(process_context().world_size())) {
    SCOPED_TRACE(strategy);
    Training saved(strategy, 1), loaded(strategy, 2);
    save(state_dict(saved.model), folder.path() / strategy);
    const auto tokens = torch::arange(10, saved.model.scale.device()).view({2, 5});
    const torch::NoGradGuard no_grad;
    const auto expected = saved.model.forward(tokens);
    EXPECT_FALSE(torch::equal(loaded.model.forward(tokens), expected)); // gathers, and the root stays so
    load(state_dict(loaded.model), folder.path() / strategy);
    EXPECT_TENSORS_EQUAL(loaded.model.forward(tokens), expected);
  }
}

TEST(TrainingCheckpoint, EachRankWritesItsShare) {
  const SharedFolder folder;
  const int n = process_context().world_size();
  Training saved("full-ragged", 1);
  saved.step(0);
  save(saved.state(), folder.path() / "c");
  std::map<std::string, int64_t> bytes; // by rank: "shard-00001", …
  int64_t total = 0;
  for (const auto& file : internal::read_index(folder.path() / "c").files) {
    bytes[file.name.substr(0, 11)] += file.bytes - file.data_begin;
    total += file.bytes - file.data_begin;
  }
  EXPECT_EQ(bytes.size(), n);
  for (const auto& [rank, of_rank] : bytes) EXPECT_LE(of_rank, total / n + total / 4) << rank;
}

TEST(TrainingCheckpoint, PlainStateOfAShardedParameterIsAnError) {
  if (process_context().world_size() == 1) GTEST_SKIP();
  TrainedModel model(1);
  torch::optim::Adagrad optimizer(model.embed->parameters()); // makes its state in its constructor
  shard(model, "full-ragged");
  EXPECT_THROWS_WITH(state_dict(model, optimizer), "optimizer.state.head.sum is a plain tensor and its parameter is sharded");
}

} // namespace
} // namespace tessera::checkpoint::training_test
