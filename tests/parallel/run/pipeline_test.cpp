// A model in a pipeline beside one process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/mesh/device_mesh.h>
#include <tessera/parallel/pipeline.h>

#include <tessera/tests/parallel/pipeline_training.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing::pipeline_test {
namespace {

using Kind = PipelineScheduleKind;

int64_t chunks_of(Kind kind) { return kind == Kind::kGPipe || kind == Kind::k1F1B || kind == Kind::kZeroBubbleH1 ? 1 : 2; }

/// Whether the kind can be made for so many micro-batches.
bool takes(Kind kind, int64_t micro_batches) {
  try {
    pipeline_schedule(kind, {.ranks = world_size(), .micro_batches = micro_batches, .chunks = chunks_of(kind)});
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

DeviceMesh pipeline_mesh() { return init_device_mesh(torch::kCPU, {world_size()}, {"pp"}); }

Pipeline make_pipeline(PipelineGpt& model, Kind kind, const PipelineOptions& options = {}) {
  const auto schedule =
      pipeline_schedule(kind, {.ranks = world_size(), .micro_batches = 2 * world_size(), .chunks = chunks_of(kind)});
  auto stages = split(layers_of(model), pipeline_mesh(), {.rank_of_stage = schedule.rank_of_stage});
  return {std::move(stages), kind, text_loss(), options};
}

TEST(Pipeline, TrainsAsOneProcessUnderEverySchedule) {
  for (const auto& [kind, name] : pipeline_schedule_names()) {
    for (const int64_t micro_batches : {2, 3, 4, 8}) {
      if (!takes(kind, micro_batches)) continue;
      SCOPED_TRACE(c10::str(name, ", m ", micro_batches));
      const TrainingPlan plan{.steps = 3, .micro_batches = micro_batches};
      const auto expected = train_alone(seeded_pipeline_gpt({.depth = 6}), plan);
      auto model = seeded_pipeline_gpt({.depth = 6});
      auto pipeline = make_pipeline(model, kind);
      expect_same_training(train_in_pipeline(pipeline, plan), expected, 1e-5);
    }
  }
}

} // namespace
} // namespace tessera::testing::pipeline_test
