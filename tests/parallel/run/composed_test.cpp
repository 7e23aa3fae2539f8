// Pipelines together with tensor parallelism, hybrid sharding, checkpoints and a scaler of gradients.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/collectives/process_context.h>
#include <tessera/collectives/run_ranks.h>
#include <tessera/fsdp/meta_init.h>
#include <tessera/fsdp/strategy.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/parallel/overlap.h>
#include <tessera/parallel/pipeline.h>
#include <tessera/training/grad_scaler.h>

#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/parallel/pipeline_training.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>
#include <tessera/tests/support/world.h>

#include <filesystem>

namespace tessera::testing::composed_test {
namespace {

using Kind = PipelineScheduleKind;

int64_t chunks_of(Kind kind) { return kind == Kind::kGPipe || kind == Kind::k1F1B || kind == Kind::kZeroBubbleH1 ? 1 : 2; }

PipelineStages stages_of(PipelineGpt& model, Kind kind, const DeviceMesh& mesh) {
  const auto schedule =
      pipeline_schedule(kind, {.ranks = mesh.size(), .micro_batches = 2 * mesh.size(), .chunks = chunks_of(kind)});
  return split(layers_of(model), mesh, {.rank_of_stage = schedule.rank_of_stage});
}

TEST(ComposedPipeline, TrainsWithTensorParallelism) {
  if (world_size() != 4 && world_size() != 2) return;
  const auto mesh = init_device_mesh(torch::kCPU, {world_size() / 2, 2}, {"pp", "tp"});
  for (const auto kind : {Kind::k1F1B, Kind::kZeroBubbleH1, Kind::kZeroBubbleV}) {
    SCOPED_TRACE(static_cast<int>(kind));
    const TrainingPlan plan{.steps = 4};
    const auto expected = train_alone(seeded_pipeline_gpt({.depth = 6}), plan);
    auto model = seeded_pipeline_gpt({.depth = 6});
    auto stages = stages_of(model, kind, mesh["pp"]);
    parallelize(stages, mesh["tp"],
                {{"blocks.*.query", Colwise{}},
                 {"blocks.*.projection", Rowwise{}},
                 {"blocks.*.up", Colwise{}},
                 {"blocks.*.down", Rowwise{}}});
    Pipeline pipeline(std::move(stages), kind, text_loss());
    expect_same_training(train_in_pipeline(pipeline, plan), expected, 1e-5);
  }
}

TEST(ComposedPipeline, TrainsWithLayersThatOverlap) {
  if (world_size() != 4 && world_size() != 2) return;
  const auto mesh = init_device_mesh(torch::kCPU, {world_size() / 2, 2}, {"pp", "tp"});
  const Shard over_time{1};
  for (const auto when : {Overlap::kAlways, Overlap::kMeasured}) {
    SCOPED_TRACE(to_string(when));
    const TrainingPlan plan{.steps = 3};
    const auto expected = train_alone(seeded_pipeline_gpt({.depth = 6}), plan);
    auto model = seeded_pipeline_gpt({.depth = 6});
    auto stages = stages_of(model, Kind::kZeroBubbleH1, mesh["pp"]);
    parallelize(stages, mesh["tp"],
                {{"blocks.*.mlp_norm", Sequence{}}, {"blocks.*.up", Colwise{}}, {"blocks.*.down", Rowwise{.output = over_time}}},
                {.overlap = {.when = when, .chunks = 2, .smallest_measured = 0}});
    const auto measured_before = overlap_decisions().size();
    Pipeline pipeline(std::move(stages), Kind::kZeroBubbleH1, text_loss());
    expect_same_training(train_in_pipeline(pipeline, plan), expected, 1e-5);
    EXPECT_EQ(overlap_decisions().size() > measured_before, when == Overlap::kMeasured);
  }
}

/// pp × replicate × shard, as threads of this process.
TEST(ComposedPipeline, TrainsWithHybridSharding) {
  if (world_size() > 1) return;
  for (const auto kind : {Kind::k1F1B, Kind::kZeroBubbleV}) {
    for (const auto strategy : sweep(std::vector{Strategy::kHybridShard, Strategy::kHierarchical}, 1)) {
      SCOPED_TRACE(c10::str("kind ", static_cast<int>(kind), ", ", row_of(strategy).name));
      const TrainingPlan plan{.steps = 3, .micro_batches = 2, .data_ranks = 4};
      const auto expected = train_alone(seeded_pipeline_gpt({.depth = 6}), plan);
      std::vector<PipelineGpt> models; // which threads would draw from one generator
      for (int i = 0; i < 8; ++i) models.push_back(seeded_pipeline_gpt({.depth = 6}));
      run_ranks_as_threads(8, [&] {
        const auto mesh = init_device_mesh(torch::kCPU, {2, 2, 2}, {"pp", "replicate", "shard"});
        const auto data = mesh[{"replicate", "shard"}];
        auto stages = stages_of(models[static_cast<size_t>(process_context().rank())], kind, mesh["pp"]);
        FullyShardOptions options;
        options.strategy = strategy;
        fully_shard(stages, data, options);
        Pipeline pipeline(std::move(stages), kind, text_loss(), {.data_mesh = data});
        const auto trained = train_in_pipeline(pipeline, plan, 2 * data.local_rank(0) + data.local_rank(1));
        expect_same_training(trained, expected, 1e-5);
      });
    }
  }
}

/// A model in a pipeline, sharded, with its optimizer.
class Job {
 public:
  Job(const DeviceMesh& mesh, Kind kind)
      : model_(on_meta([] { return PipelineGpt(PipelineGptOptions{.depth = 6}); })),
        stages_(sharded(stages_of(model_, kind, mesh["pp"]), mesh["dp"])),
        pipeline_(stages_, kind, text_loss(), {.data_mesh = mesh["dp"]}),
        optimizer_(stages_.parameters(), torch::optim::AdamWOptions(1e-3)) {}

  void set_values(const torch::nn::Module& values) {
    const torch::NoGradGuard no_grad;
    const auto from = values.named_parameters();
    for (auto& item : stages_.module->named_parameters()) item.value().copy_(from[item.key()].detach());
  }
  /// Every data rank has the same micro-batches.
  double step(int64_t number) {
    optimizer_.zero_grad();
    const auto loss = pipeline_.step(text_batches({}, number, 0)).item<double>();
    clip_grad_norm_(stages_, 0.5);
    optimizer_.step();
    return loss;
  }
  void save(const std::filesystem::path& folder) { save_stages(stages_, optimizer_, folder); }
  void load(const std::filesystem::path& folder) { load_stages(stages_, optimizer_, folder); }

 private:
  static PipelineStages sharded(PipelineStages stages, const DeviceMesh& mesh) {
    fully_shard(stages, mesh);
    materialize(*stages.module, [](torch::nn::Module& module) {
      for (auto& each : module.parameters(/*recurse=*/false)) each.zero_();
    });
    return stages;
  }

  PipelineGpt model_;
  PipelineStages stages_;
  Pipeline pipeline_;
  torch::optim::AdamW optimizer_;
};

/// Saved by a pipeline of all ranks, loaded by pipelines of other lengths, which go on as the first one does.
TEST(ComposedPipeline, ContinuesFromACheckpointOnAnyNumberOfStages) {
  const SharedFolder folder;
  const auto mesh_of = [](int64_t ranks) { return init_device_mesh(torch::kCPU, {ranks, world_size() / ranks}, {"pp", "dp"}); };
  Job first(mesh_of(world_size()), Kind::kZeroBubbleH1);
  first.set_values(*seeded_pipeline_gpt({.depth = 6}));
  for (int64_t i = 0; i < 3; ++i) first.step(i);
  first.save(folder.path() / "step");
  const double fourth = first.step(3), fifth = first.step(4);
  for (int64_t ranks = 1; ranks <= world_size(); ++ranks) {
    if (world_size() % ranks != 0) continue;
    for (const auto kind : {Kind::k1F1B, Kind::kZeroBubbleV}) {
      SCOPED_TRACE(c10::str(ranks, " ranks, kind ", static_cast<int>(kind)));
      Job other(mesh_of(ranks), kind);
      other.load(folder.path() / "step");
      EXPECT_NEAR(other.step(3), fourth, 1e-5);
      EXPECT_NEAR(other.step(4), fifth, 1e-5);
    }
  }
}

void expect_same_weights(const torch::nn::Module& part, const torch::nn::Module& whole) {
  const auto expected = whole.named_parameters();
  for (const auto& item : part.named_parameters())
    EXPECT_TENSORS_CLOSE(item.value().detach(), expected[item.key()].detach(), 1e-5, 1e-6) << item.key();
}

TEST(ComposedPipeline, SkipsStepsThatOverflowOnAnyStage) {
  const auto mesh = init_device_mesh(torch::kCPU, {world_size()}, {"pp"});
  auto model = seeded_pipeline_gpt(), twin = seeded_pipeline_gpt();
  auto stages = stages_of(model, Kind::kZeroBubbleH1, mesh);
  Pipeline pipeline(stages, Kind::kZeroBubbleH1, text_loss());
  torch::optim::SGD optimizer(stages.parameters(), 0.1);
  GradScaler scaler({.init_scale = 1024, .mesh = mesh});
  const TrainingPlan plan;
  const auto step = [&](int64_t number, bool overflows) {
    optimizer.zero_grad();
    pipeline.step(text_batches(plan, number, 0), {.scale = [&](const torch::Tensor& loss) { return scaler.scale(loss); }});
    if (overflows && world_rank() == 0) { // on the first stage alone
      const torch::NoGradGuard no_grad;
      stages.parameters()[0].mutable_grad().fill_(INFINITY);
    }
    scaler.unscale_(optimizer);
    clip_grad_norm_(stages, 0.5);
    const bool stepped = scaler.step(optimizer);
    scaler.update();
    return stepped;
  };
  EXPECT_TRUE(step(0, false));
  EXPECT_FALSE(step(1, true));
  EXPECT_EQ(scaler.get_scale(), 512);
  EXPECT_TRUE(step(0, false));
  torch::optim::SGD alone(twin->parameters(), 0.1);
  for (int i = 0; i < 2; ++i) {
    alone.zero_grad();
    double count = 0;
    for (int64_t at = 0; at < plan.micro_batches; ++at) count += counted(std::get<1>(draw_text(0, 0, at)));
    for (int64_t at = 0; at < plan.micro_batches; ++at) {
      const auto [text, targets] = draw_text(0, 0, at);
      (summed_loss(twin->forward(text), targets) / count).backward();
    }
    clip_grad_norm_(twin->parameters(), 0.5);
    alone.step();
  }
  expect_same_weights(*stages.module, *twin);
}

TEST(ComposedPipeline, ClipsByEveryNorm) {
  const auto mesh = init_device_mesh(torch::kCPU, {world_size()}, {"pp"});
  for (const double type : {1.0, 2.0, 3.0, 0.0, static_cast<double>(INFINITY)}) {
    auto model = seeded_pipeline_gpt(), twin = seeded_pipeline_gpt();
    auto stages = stages_of(model, Kind::k1F1B, mesh);
    Pipeline pipeline(stages, Kind::k1F1B, {.sum = [](const PipelineValue& logits, const PipelineValue& batch) {
                        return summed_loss(logits.toTensor(), std::get<1>(batch.to<TextBatch>()));
                      }});
    pipeline.step({PipelineValue(draw_text(0, 0, 1)), PipelineValue(draw_text(0, 0, 2))});
    for (int64_t i = 1; i < 3; ++i) {
      const auto [text, targets] = draw_text(0, 0, i);
      (summed_loss(twin->forward(text), targets) / 2).backward();
    }
    const auto norm = clip_grad_norm_(stages, 0.01, type).item<double>();
    const auto expected = clip_grad_norm_(twin->parameters(), 0.01, type).item<double>();
    EXPECT_NEAR(norm, expected, 1e-4 * expected) << type;
    const auto gradients = twin->named_parameters();
    for (const auto& item : stages.module->named_parameters())
      EXPECT_TENSORS_CLOSE(item.value().grad(), gradients[item.key()].grad(), 1e-4, 1e-7) << item.key();
  }
  auto model = seeded_pipeline_gpt();
  auto stages = stages_of(model, Kind::k1F1B, mesh);
  for (auto& each : stages.parameters()) each.mutable_grad() = torch::full_like(each, NAN);
  EXPECT_THROWS_WITH(clip_grad_norm_(stages, 1.0, 2.0, /*error_if_nonfinite=*/true),
                     "the 2-norm of the gradients of all stages is nan");
}

} // namespace
} // namespace tessera::testing::composed_test
