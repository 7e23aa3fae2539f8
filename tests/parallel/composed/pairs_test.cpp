// Each two of what a training may have, alone and in a pipeline, beside one process.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/tests/parallel/composed/composed_training.h>
#include <tessera/tests/support/draw.h>
#include <tessera/tests/support/sweep.h>
#include <tessera/tests/support/temporary_folder.h>
#include <tessera/tests/support/world.h>

#include <algorithm>
#include <array>
#include <set>
#include <string_view>

namespace tessera::testing::composed::pairs_test {
namespace {

constexpr std::array<std::string_view, 12> kFeatures{"pp",        "tp",           "cp",     "ep",       "replicate",  "shard",
                                                     "recompute", "accumulation", "scaler", "averages", "evaluation", "resume"};
using Features = std::set<std::string_view>;

std::string text_of(const Features& features) {
  std::string text;
  for (const auto each : features) text += c10::str(text.empty() ? "" : " x ", each);
  return text;
}

/// All pairs, and these in a pipeline.
std::vector<Features> all_pairs() {
  std::set<Features> all;
  for (const auto first : kFeatures) {
    for (const auto second : kFeatures) {
      if (first == second) continue;
      all.insert({first, second});
      all.insert({first, second, "pp"});
    }
  }
  return {all.begin(), all.end()};
}

Manner manner_of(const Features& features) {
  const auto ranks_of = [&](std::string_view name) { return features.contains(name) ? int64_t{2} : int64_t{1}; };
  Shape shape{.pipeline = features.contains("pp") ? 2 : 0,
              .replicas = ranks_of("replicate"),
              .shards = ranks_of("shard"),
              .parts = ranks_of("cp"),
              .tensor = ranks_of("tp"),
              .experts = ranks_of("ep")};
  if (shape.experts > shape.shards * shape.parts * shape.tensor) shape.shards = 2;
  return {.shape = shape, .kind = PipelineScheduleKind::kZeroBubbleH1, .recomputes = features.contains("recompute")};
}

/// Any other on as many ranks.
Manner another(const Manner& before, int64_t experts, Draw& draw) {
  auto manner = before;
  manner.shape = draw.of(shapes_of(before.shape.ranks(), experts));
  manner.kind = manner.shape.pipeline > 1 && draw.chance(50) ? PipelineScheduleKind::kZeroBubbleV : PipelineScheduleKind::k1F1B;
  return manner;
}

void train(Training& training, const Features& features, const Manner& manner, const std::filesystem::path& folder) {
  const auto has = [&](std::string_view name) { return features.contains(name); };
  Draw draw(test_seed());
  for (uint64_t step = 0; step < 5; ++step) {
    if (has("evaluation")) training.evaluate(900 + step, 3);
    training.step(
        {.seed = 10 * step, .micro_batches = 4, .calls = has("accumulation") ? 2 : 1, .overflows = has("scaler") && step == 1});
    if (has("resume") && step == 2) training.resume(another(manner, has("ep") ? 4 : 0, draw), folder / "step");
  }
  if (has("evaluation")) training.evaluate(999, 3);
}

Task task_of(const Features& features) {
  Task task{.averages = features.contains("averages"), .scales = features.contains("scaler")};
  if (features.contains("ep")) task.net = {.depth = 2, .experts = 4};
  return task;
}

void compare(const Features& features, bool in_half) {
  auto manner = manner_of(features);
  const auto task = task_of(features);
  const auto whole = make_whole(task, manner);
  train(*whole, features, manner, {});
  const auto weights = whole->weights();
  manner.in_half = in_half;
  const TemporaryFolder folder;
  run_as(manner.shape.ranks(), [&] {
    SplitTraining split(task, manner);
    train(split, features, manner, folder.path());
    expect_same(split, whole->numbers, weights, in_half ? 2e-2 : 1e-5);
  });
}

TEST(Pairs, TrainAsOneProcess) {
  if (world_size() > 1) return; // which are threads here
  for (const auto& features : sweep(all_pairs(), 6)) {
    SCOPED_TRACE(text_of(features));
    compare(features, /*in_half=*/false);
    if (features.contains("scaler")) compare(features, /*in_half=*/true);
    if (::testing::Test::HasFailure() && !full_run()) return;
  }
}

} // namespace
} // namespace tessera::testing::composed::pairs_test
