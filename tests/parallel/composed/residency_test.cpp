// Few stages gathered at once, with all that frees and gathers beside a step: recomputation, a scaler that skips a step,
// averages, evaluations between the steps, and checkpoints with which other ranks go on.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/parallel/composed/composed_training.h>
#include <tessera/tests/support/sweep.h>
#include <tessera/tests/support/world.h>

#include <filesystem>

namespace tessera::testing::composed::residency_test {
namespace {

using Kind = PipelineScheduleKind;

/// Shapes that follow one another, of so many ranks.
struct Course {
  Shape first, second;
};

std::vector<Course> courses() {
  const Course of_two{{.pipeline = 1, .shards = 2}, {.pipeline = 2}};
  const Course of_four{{.pipeline = 2, .shards = 2}, {.pipeline = 1, .shards = 4}};
  const Course of_replicas{{.pipeline = 2, .shards = 2}, {.pipeline = 1, .replicas = 2, .shards = 2}};
  if (world_size() == 1) return {of_two, of_four};
  if (world_size() == 2) return {of_two};
  if (world_size() == 4) return {of_four, of_replicas};
  return {};
}

struct Case {
  Course course;
  Manner first, second; ///< without shapes
  bool scales = true;

  std::string text() const {
    return c10::str(first.text(), " (", course.first.text(), "), then ", second.text(), " (", course.second.text(), ")",
                    scales ? ", scaled" : "");
  }
};

std::vector<Case> all_cases() {
  std::vector<Case> all;
  for (const auto& course : courses()) {
    for (const auto kind : {Kind::kInterleaved1F1B, Kind::kInterleavedZeroBubble, Kind::kZeroBubbleV, Kind::kDualPipeV}) {
      for (const bool recomputes : {false, true}) {
        for (const auto strategy : {std::optional<Strategy>(), std::optional(Strategy::kZero2)}) {
          const Manner first{.kind = kind,
                             .recomputes = recomputes,
                             .resident_stages = 1,
                             .strategy = course.first.replicas > 1 ? std::nullopt : strategy};
          const Manner second{.kind = kind, .recomputes = !recomputes, .residency = Residency::kMicroBatch, .resident_stages = 1};
          all.push_back({course, first, second, /*scales=*/!strategy});
        }
      }
    }
  }
  return all;
}

Manner in(Manner manner, const Shape& shape) {
  manner.shape = shape;
  return manner;
}

/// Overflows in the first step after each beginning, so that what a skipped step had gathered is seen.
void train(Training& training, const Case& each, const std::filesystem::path& folder) {
  const auto& [first, second] = each.course;
  const StepPlan plan{.micro_batches = 4};
  const auto step = [&](uint64_t seed, bool overflows) {
    auto now = plan;
    now.seed = seed;
    now.calls = seed % 2 == 0 ? 1 : 2;
    now.overflows = overflows && each.scales;
    training.step(now);
    training.evaluate(900 + seed, 3);
  };
  training.evaluate(899, 2);
  step(0, true);
  step(10, false);
  training.resume(in(each.second, second), folder / "middle");
  step(21, true);
  step(30, false);
  training.resume(in(each.first, first), folder / "end");
  training.evaluate(898, 2);
  step(41, false);
}

TEST(ResidentStages, TrainAsOneProcessBesideAllThatGathers) {
  const SharedFolder folder;
  int number = 0;
  for (const auto& each : sweep(all_cases(), 3)) {
    SCOPED_TRACE(each.text());
    const Task task{.net = {.dtype = torch::kDouble}, .averages = true, .scales = each.scales};
    const auto manner = in(each.first, each.course.first);
    const auto whole = make_whole(task, manner);
    train(*whole, each, {});
    const auto weights = whole->weights();
    const auto place = folder.path() / std::to_string(number++);
    run_as(manner.shape.ranks(), [&] {
      SplitTraining split(task, manner);
      train(split, each, place);
      expect_same(split, whole->numbers, weights, 1e-8);
    });
    if (::testing::Test::HasFailure() && !full_run()) return;
  }
}

} // namespace
} // namespace tessera::testing::composed::residency_test
