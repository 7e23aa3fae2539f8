// Stages whose parameters are sharded, replicated or parallel.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/collectives/process_context.h>
#include <tessera/collectives/run_ranks.h>
#include <tessera/fsdp/strategy.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/parallel/pipeline.h>

#include <tessera/tests/parallel/pipeline_training.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>
#include <tessera/tests/support/world.h>

#include <mutex>
#include <optional>

namespace tessera::testing::sharded_pipeline_test {
namespace {

using Kind = PipelineScheduleKind;

int64_t chunks_of(Kind kind) { return kind == Kind::kGPipe || kind == Kind::k1F1B || kind == Kind::kZeroBubbleH1 ? 1 : 2; }

std::vector<int64_t> ranks_of_stages(Kind kind, int64_t ranks) {
  return pipeline_schedule(kind, {.ranks = ranks, .micro_batches = 2 * ranks, .chunks = chunks_of(kind)}).rank_of_stage;
}

/// A mesh of pp and dp; nothing where the ranks do not fit.
std::vector<DeviceMesh> meshes() {
  std::vector<DeviceMesh> all{init_device_mesh(torch::kCPU, {world_size(), 1}, {"pp", "dp"})};
  if (world_size() == 4) all.push_back(init_device_mesh(torch::kCPU, {2, 2}, {"pp", "dp"}));
  if (world_size() > 1) all.push_back(init_device_mesh(torch::kCPU, {1, world_size()}, {"pp", "dp"}));
  return all;
}

struct Setting {
  Kind kind = Kind::k1F1B;
  FullyShardOptions sharding = {};
  Residency residency = Residency::kStage;
  bool recomputes = false;
};

TrainingResult train(const DeviceMesh& mesh, const DeviceMesh& data, const Setting& setting, const TrainingPlan& plan) {
  auto model = seeded_pipeline_gpt({.depth = 6, .recomputes = setting.recomputes});
  auto stages =
      split(layers_of(model), mesh["pp"], {.rank_of_stage = ranks_of_stages(setting.kind, mesh.size(mesh.dim_of("pp")))});
  fully_shard(stages, data, setting.sharding);
  Pipeline pipeline(std::move(stages), setting.kind, text_loss(), {.data_mesh = data, .residency = setting.residency});
  return train_in_pipeline(pipeline, plan, data.ndim() == 1 ? data.local_rank() : 2 * data.local_rank(0) + data.local_rank(1));
}

void compare(const DeviceMesh& mesh, const Setting& setting) {
  const TrainingPlan plan{.steps = 3, .data_ranks = mesh.size(1)};
  const auto expected = train_alone(seeded_pipeline_gpt({.depth = 6}), plan);
  expect_same_training(train(mesh, mesh["dp"], setting, plan), expected, 1e-5);
}

TEST(ShardedPipeline, TrainsAsOneProcessUnderEverySchedule) {
  for (const auto& mesh : meshes()) {
    for (const auto& [kind, name] : sweep(pipeline_schedule_names(), 3)) {
      SCOPED_TRACE(c10::str(name, " on ", mesh.to_string()));
      if (kind == Kind::kDualPipeV && mesh.size(0) > 2) continue; // which needs more than 4 micro-batches
      compare(mesh, {.kind = kind});
    }
  }
}

std::vector<Setting> settings() {
  using enum tessera::Strategy;
  std::vector<Setting> all;
  for (const auto strategy : {kNoShard, kZero1, kZero2, kFullShard}) {
    for (const auto residency : {Residency::kStage, Residency::kMicroBatch}) {
      for (const auto kind : {Kind::k1F1B, Kind::kZeroBubbleH1})
        all.push_back({.kind = kind, .sharding = {.strategy = strategy}, .residency = residency});
    }
  }
  return all;
}

TEST(ShardedPipeline, TrainsUnderEveryStrategy) {
  for (const auto& mesh : meshes()) {
    for (const auto& setting : sweep(settings(), 3)) {
      SCOPED_TRACE(c10::str(row_of(*setting.sharding.strategy).name, " on ", mesh.to_string(), ", residency ",
                            static_cast<int>(setting.residency), ", kind ", static_cast<int>(setting.kind)));
      compare(mesh, setting);
    }
  }
}

TEST(ShardedPipeline, Recomputes) {
  for (const auto& mesh : meshes()) {
    for (const auto kind : {Kind::kZeroBubbleH1, Kind::kZeroBubbleV}) compare(mesh, {.kind = kind, .recomputes = true});
  }
}

/// A group for each layer, and one for a tied weight.
int64_t groups_of(const PipelineStages& stages) {
  int64_t groups = 0;
  for (const auto& stage : stages.local) groups += stage.end - stage.begin;
  for (const auto& tie : stages.ties) groups += std::count(tie.ranks.begin(), tie.ranks.end(), stages.rank());
  return groups;
}

/// One gather and one reduction a group and step.
TEST(ShardedPipeline, GathersAndReducesOnceAStep) {
  if (world_size() != 4) return;
  const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"pp", "dp"});
  for (const auto kind : {Kind::kGPipe, Kind::k1F1B, Kind::kZeroBubbleH1, Kind::kInterleaved1F1B, Kind::kZeroBubbleV}) {
    SCOPED_TRACE(static_cast<int>(kind));
    auto model = seeded_pipeline_gpt({.depth = 6});
    auto stages = split(layers_of(model), mesh["pp"], {.rank_of_stage = ranks_of_stages(kind, 2)});
    fully_shard(stages, mesh["dp"]);
    Pipeline pipeline(std::move(stages), kind, text_loss(), {.data_mesh = mesh["dp"]});
    const TrainingPlan plan;
    const auto groups = groups_of(pipeline.stages());
    const auto optimizer = pipeline_sgd(pipeline.stages().parameters());
    for (int64_t step = 0; step < 3; ++step) {
      optimizer->zero_grad();
      process_context().reset_counters();
      pipeline.step(text_batches(plan, step, mesh.local_rank("dp")));
      const auto gathers = process_context().count(CollectiveKind::kAllGather).calls;
      const auto reductions = process_context().count(CollectiveKind::kReduceScatter).calls;
      EXPECT_EQ(reductions, groups) << "step " << step;
      EXPECT_EQ(gathers, groups + 1) << "step " << step; // one compares what the ranks were given
      optimizer->step();
    }
  }
}

/// How often this rank gathers in a step, by the schedule.
int64_t gathers_of(const PipelineSchedule& schedule, const PipelineStages& stages) {
  int64_t gathers = 0;
  for (const auto& action : schedule.actions[static_cast<size_t>(stages.rank())]) {
    if (action.work != PipelineWork::kUnshard) continue;
    const auto begin = static_cast<size_t>(action.stage);
    gathers += stages.bounds[begin + 1] - stages.bounds[begin];
  }
  return gathers;
}

struct GatherCalls {
  std::optional<int64_t> before; ///< that were started as the first layer began; on other ranks than the first none is
  int64_t all = 0;
};

/// In the second step under a window of so many stages a rank.
GatherCalls gather_calls(const DeviceMesh& mesh, int64_t active) {
  const auto calls = [] { return process_context().count(CollectiveKind::kAllGather).calls; };
  auto model = seeded_pipeline_gpt({.depth = 6, .ties = false});
  GatherCalls seen;
  PipelineLayers layers(*model);
  layers.add("embed", {"tokens", "places"}, [&](const TextBatch& batch) {
    if (!seen.before) seen.before = calls();
    return model->embed(std::get<0>(batch));
  });
  layers.add_list("blocks", [&](GptBlockImpl& block, const torch::Tensor& x) { return model->block(block, x); });
  layers.add("head", {"norm", "head"}, [&](const torch::Tensor& x) { return model->logits(x); });
  auto stages = split(layers, mesh["pp"], {.rank_of_stage = ranks_of_stages(Kind::kInterleaved1F1B, 2)});
  fully_shard(stages, mesh["dp"]);
  Pipeline pipeline(std::move(stages), Kind::kInterleaved1F1B, text_loss(), {.data_mesh = mesh["dp"], .resident_stages = active});
  for (int64_t step = 0; step < 2; ++step) {
    pipeline.stages().module->zero_grad();
    seen.before.reset();
    process_context().reset_counters();
    pipeline.step(text_batches({}, step, mesh.local_rank("dp")));
  }
  seen.all = calls();
  EXPECT_EQ(seen.all, gathers_of(pipeline.schedule(4), pipeline.stages()) + 1); // one compares what the ranks were given
  return seen;
}

TEST(ShardedPipeline, RefusesANegativeWindow) {
  auto model = seeded_pipeline_gpt({.depth = 6});
  const auto stages = split(layers_of(model), meshes().front()["pp"]);
  EXPECT_THROWS_WITH(Pipeline(stages, Kind::k1F1B, text_loss(), {.resident_stages = -1}),
                     "resident_stages is -1, but must not be negative");
}

TEST(ShardedPipeline, GathersAsItsScheduleSays) {
  if (world_size() != 4) return;
  const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"pp", "dp"});
  const auto one = gather_calls(mesh, 1), both = gather_calls(mesh, 2);
  EXPECT_GT(one.all, both.all);
  if (one.before) EXPECT_EQ(*both.before, *one.before + 1); // the first of the other stage's, beside the first stage
}

TEST(ShardedPipeline, IsBitwiseTheSameTwice) {
  for (const auto& mesh : meshes()) {
    const TrainingPlan plan{.steps = 4, .data_ranks = mesh.size(1)};
    const Setting setting{.kind = Kind::kZeroBubbleH1};
    const auto first = train(mesh, mesh["dp"], setting, plan), second = train(mesh, mesh["dp"], setting, plan);
    EXPECT_EQ(first.losses, second.losses);
    EXPECT_EQ(first.norms, second.norms);
    for (const auto& [name, weight] : first.weights) EXPECT_TENSORS_EQUAL(second.weights.at(name), weight) << name;
  }
}

} // namespace
} // namespace tessera::testing::sharded_pipeline_test
