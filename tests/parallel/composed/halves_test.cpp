// What waits for the second half of a backward: weights of experts, and weights that are split and sharded.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/collectives/process_context.h>
#include <tessera/tests/parallel/composed/composed_training.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing::composed::halves_test {
namespace {

/// Bitwise as under the plain backward, and no name of what came with the first half has one of `weights` in it.
void expect_halves(const Task& task, Manner manner, const std::vector<std::string>& weights) {
  SCOPED_TRACE(manner.text());
  run_as(manner.shape.ranks(), [&, manner]() mutable {
    manner.kind = PipelineScheduleKind::kZeroBubbleH1;
    SplitTraining split(task, manner);
    manner.kind = PipelineScheduleKind::k1F1B;
    SplitTraining plain(task, manner);
    for (uint64_t step = 0; step < 3; ++step) {
      split.step({.seed = step});
      plain.step({.seed = step});
    }
    EXPECT_EQ(split.numbers, plain.numbers);
    const auto expected = plain.weights();
    for (const auto& [name, weight] : split.weights()) EXPECT_TENSORS_EQUAL(weight, expected.at(name)) << name;
    EXPECT_FALSE(split.pipeline().not_split().empty());
    for (const auto& name : split.pipeline().not_split()) {
      for (const auto& weight : weights) EXPECT_EQ(name.find(weight), std::string::npos) << name;
    }
  });
}

TEST(SecondHalf, HasTheWeightsOfExperts) {
  if (world_size() > 1) return; // whose ranks are threads here
  const std::vector<std::string> weights{"experts.experts", "query.weight"};
  for (const auto dtype : {torch::kFloat, torch::kDouble}) { // by one kernel, and by a loop
    for (const auto storage : {ExpertStorage::kStacked, ExpertStorage::kModules}) {
      const Task task{.net = {.depth = 2, .experts = 4, .storage = storage, .dtype = dtype}};
      expect_halves(task, {.shape = {.pipeline = 2, .shards = 2, .experts = 2}}, weights);
      expect_halves(task, {.shape = {.pipeline = 2, .shards = 2}}, weights);
    }
  }
}

TEST(SecondHalf, HasWeightsThatAreSplitAndSharded) {
  if (world_size() > 1) return; // whose ranks are threads here
  const std::vector<std::string> weights{"query.weight", "projection.weight", "up.weight", "down.weight"};
  expect_halves({.net = {.depth = 2}}, {.shape = {.pipeline = 2, .tensor = 2}}, weights);
  expect_halves({.net = {.depth = 2}}, {.shape = {.pipeline = 2, .shards = 2, .tensor = 2}}, weights);
}

/// Each half codes what it multiplies, as the plain backward codes it.
TEST(SecondHalf, HasWeightsThatMultiplyInFloat8) {
  if (world_size() > 1) return; // whose ranks are threads here
  const std::vector<std::string> weights{"query.weight", "projection.weight", "up.weight", "down.weight", "head.weight"};
  for (const auto scaling : {Float8Scaling::kTensor, Float8Scaling::kRows}) {
    const Task task{.net = {.depth = 2, .ties = false, .float8 = scaling}};
    const bool recomputes = scaling == Float8Scaling::kRows;
    expect_halves(task, {.shape = {.pipeline = 2, .shards = 2}, .recomputes = recomputes}, weights);
    expect_halves(task, {.shape = {.pipeline = 2, .shards = 2, .tensor = 2}, .recomputes = !recomputes}, weights);
    expect_halves(task, {.shape = {.pipeline = 2, .parts = 2}, .residency = Residency::kMicroBatch}, weights);
    expect_halves(task, {.shape = {.pipeline = 2}, .recomputes = recomputes, .in_half = true}, weights);
  }
}

} // namespace
} // namespace tessera::testing::composed::halves_test
