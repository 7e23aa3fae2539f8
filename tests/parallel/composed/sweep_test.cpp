// Every schedule, on pipelines beside all other dims, trains as one process does.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/parallel/pipeline_schedule.h>

#include <tessera/tests/parallel/composed/chosen_range.h>
#include <tessera/tests/parallel/composed/composed_training.h>
#include <tessera/tests/support/sweep.h>
#include <tessera/tests/support/world.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <map>
#include <tuple>

namespace tessera::testing::composed::sweep_test {
namespace {

struct Case {
  Manner manner;
  int64_t micro_batches = 4;
  bool uses_adamw = false;

  std::string text() const { return c10::str(manner.text(), ", m ", micro_batches, uses_adamw ? ", AdamW" : ", SGD"); }
};

/// Beside a pipeline of so many ranks.
std::vector<Shape> meshes_of(int64_t ranks) {
  std::vector<Shape> all{{.pipeline = ranks},
                         {.pipeline = ranks, .shards = 2},
                         {.pipeline = ranks, .tensor = 2},
                         {.pipeline = ranks, .parts = 2},
                         {.pipeline = ranks, .replicas = 2, .shards = 2}};
  if (ranks == 2) all.push_back({.pipeline = ranks, .shards = 2, .tensor = 2});
  return all;
}

/// Those of `world` ranks, or of all numbers that are threads of one.
std::vector<Case> cases_of(int64_t world) {
  std::vector<Case> all;
  for (int64_t ranks = 2; ranks <= 4; ++ranks) {
    for (const auto& shape : meshes_of(ranks)) {
      if (world == 1 ? shape.ranks() <= 4 : shape.ranks() != world) continue;
      for (const auto& [kind, name] : pipeline_schedule_names()) {
        for (int64_t m = 2; m <= 8; ++m) {
          if (!takes(kind, ranks, m)) continue;
          for (const bool recomputes : {false, true}) {
            for (const bool uses_adamw : {false, true})
              all.push_back({{.shape = shape, .kind = kind, .recomputes = recomputes}, m, uses_adamw});
          }
        }
      }
    }
  }
  return all;
}

struct Trained {
  std::vector<double> numbers;
  std::map<std::string, torch::Tensor> weights;
};

constexpr int64_t kSteps = 20, kStepsOfTwo = 3;

void train(Training& training, const Case& each, int64_t steps) {
  for (int64_t i = 0; i < steps; ++i) training.step({.seed = static_cast<uint64_t>(i), .micro_batches = each.micro_batches});
}

/// As small as it can be: a layer for each stage of a schedule with two stages a rank, and attention in the first block alone,
/// but where sequences are split. With AdamW's default eps one process in fp32 is 1e-5 beside itself in fp64 after 20 steps: some
/// gradients are rounding alone.
Task task_of(const Case& each) {
  const auto depth = 2 * each.manner.shape.pipeline - 2;
  return {.net = {.depth = depth, .attending = each.manner.shape.parts > 1 ? depth : 1},
          .uses_adamw = each.uses_adamw,
          .eps = 1e-6,
          .max_norm = each.uses_adamw ? 0 : 0.5};
}

/// What one process computes, once for all cases that it is the same for.
const Trained& expected_of(const Case& each) {
  static std::map<std::tuple<int64_t, int64_t, int64_t, int64_t, bool>, Trained> known;
  const auto& shape = each.manner.shape;
  auto& trained = known[{shape.pipeline, shape.parts, shape.data_ranks(), each.micro_batches, each.uses_adamw}];
  if (trained.numbers.empty()) {
    const auto whole = make_whole(task_of(each), each.manner);
    train(*whole, each, kSteps);
    trained = {whole->numbers, whole->weights()};
  }
  return trained;
}

void compare(const Case& each) {
  const auto& expected = expected_of(each);
  run_as(each.manner.shape.ranks(), [&] {
    SplitTraining split(task_of(each), each.manner), again(task_of(each), each.manner);
    train(split, each, kSteps);
    expect_same(split, expected.numbers, expected.weights, 1e-5);
    train(again, each, kStepsOfTwo);
    const auto count = static_cast<std::ptrdiff_t>(again.numbers.size());
    EXPECT_EQ(again.numbers, std::vector<double>(split.numbers.begin(), split.numbers.begin() + count)) << "in a second run";
  });
}

/// Those of `cases` that TESSERA_CASES names, counted from 0, or a drawn part of all.
std::vector<Case> chosen(const std::vector<Case>& cases) {
  const auto range = chosen_range("TESSERA_CASES");
  if (!range) return sweep(cases, world_size() == 1 ? 3 : 2);
  const auto count = std::ssize(cases);
  return {cases.begin() + std::min(range->first, count), cases.begin() + std::min(range->second + 1, count)};
}

TEST(PipelineSweep, TrainsAsOneProcess) {
  int64_t number = 0;
  const auto cases = cases_of(world_size());
  for (const auto& each : chosen(cases)) {
    SCOPED_TRACE(each.text());
    compare(each);
    if (::testing::Test::HasFailure()) {
      ADD_FAILURE() << "this case"; // which the ranks that are threads do not name
      return;
    }
    ++number;
  }
  RecordProperty("cases", c10::str(number, " of ", cases.size()));
  if (std::getenv("TESSERA_CASES")) std::cout << number << " of " << cases.size() << " cases" << std::endl;
}

} // namespace
} // namespace tessera::testing::composed::sweep_test
