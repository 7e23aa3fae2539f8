// Products in fp8 in the stages of a pipeline, under every schedule, sharded and recomputed, beside one process with the same
// ones.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/parallel/pipeline_schedule.h>

#include <tessera/tests/parallel/composed/composed_training.h>
#include <tessera/tests/support/sweep.h>
#include <tessera/tests/support/world.h>

#include <string>
#include <vector>

namespace tessera::testing::composed::float8_test {
namespace {

/// In fp64, where the codes of both sides are the same ones: in fp32 a number that lies between two codes may get either.
constexpr double kBound = 1e-9;
constexpr int64_t kSteps = 20;

struct Case {
  Manner manner;
  Float8Scaling scaling = Float8Scaling::kTensor;

  std::string text() const { return c10::str(manner.text(), scaling == Float8Scaling::kTensor ? "" : ", scales of rows"); }
};

std::vector<Shape> shapes() {
  const auto world = world_size();
  if (world == 1) return {{.pipeline = 2}, {.pipeline = 2, .shards = 2}, {.pipeline = 3}};
  std::vector<Shape> all{{.pipeline = world}};
  if (world == 4) all.push_back({.pipeline = 2, .shards = 2});
  return all;
}

std::vector<Case> all_cases() {
  std::vector<Case> all;
  for (const auto& shape : shapes()) {
    for (const auto& [kind, name] : pipeline_schedule_names()) {
      for (const bool recomputes : {false, true}) {
        for (const auto residency : {Residency::kStage, Residency::kMicroBatch}) {
          if (residency == Residency::kMicroBatch && shape.shards == 1) continue;
          for (const auto scaling : {Float8Scaling::kTensor, Float8Scaling::kRows}) {
            const Manner manner{.shape = shape, .kind = kind, .recomputes = recomputes, .residency = residency};
            all.push_back({manner, scaling});
            if (scaling != Float8Scaling::kTensor || shape.shards == 1) continue;
            all.push_back({manner, scaling});
            all.back().manner.gathers_codes = true;
          }
        }
      }
    }
  }
  return all;
}

void train(Training& training, const Manner& manner) {
  for (int64_t step = 0; step < kSteps; ++step)
    training.step({.seed = static_cast<uint64_t>(step), .micro_batches = 2 * manner.shape.pipeline});
}

/// Weights that multiply in fp8 wait for the second half, as others do.
void expect_split(const SplitTraining& split) {
  for (const auto& name : split.pipeline().not_split()) {
    for (const char* weight : {"query.weight", "projection.weight", "up.weight", "down.weight"})
      EXPECT_EQ(name.find(weight), std::string::npos) << name;
  }
}

TEST(Float8InPipelines, TrainsAsOneProcess) {
  const auto cases = all_cases();
  const auto is_split_and_sharded = [](const Case& each) {
    const auto& manner = each.manner;
    const bool is_known = each.scaling == Float8Scaling::kRows || manner.gathers_codes;
    return manner.kind == PipelineScheduleKind::kZeroBubbleH1 && manner.recomputes && is_known &&
           (manner.shape.shards > 1 || world_size() == 2 || world_size() == 3);
  };
  for (const auto& each : sweep(cases, 3, is_split_and_sharded)) {
    SCOPED_TRACE(each.text());
    const auto depth = 2 * each.manner.shape.pipeline - 2; // a layer for each stage
    const Task task{.net = {.depth = depth, .attending = 1, .dtype = torch::kDouble, .float8 = each.scaling}};
    const auto whole = make_whole(task, each.manner);
    train(*whole, each.manner);
    const auto weights = whole->weights();
    run_as(each.manner.shape.ranks(), [&] {
      SplitTraining split(task, each.manner);
      train(split, each.manner);
      expect_same(split, whole->numbers, weights, kBound);
      expect_split(split);
    });
    if (::testing::Test::HasFailure() && !full_run()) return;
  }
}

} // namespace
} // namespace tessera::testing::composed::float8_test
