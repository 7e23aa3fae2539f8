// The peak that a plan predicts on the meta device, beside what real ranks hold on the CPU.
#include <ATen/Context.h>
#include <ATen/cpu/Utils.h>
#include <gtest/gtest.h>

#include <tessera/collectives/process_context.h>
#include <tessera/fsdp/clip_grad.h>
#include <tessera/optim/step.h>
#include <tessera/parallel/pipeline.h>
#include <tessera/plan/model_folder.h>
#include <tessera/plan/prediction.h>
#include <tessera/plan/step/planned_mesh.h>
#include <tessera/plan/step/planned_optimizer.h>
#include <tessera/plan/step/planned_step.h>

#include <string>
#include <vector>

#include <tessera/tests/fsdp/held_memory.h>
#include <tessera/tests/plan/models/configs.h>
#include <tessera/tests/plan/test_models.h>
#include <tessera/tests/support/sweep.h>
#include <tessera/tests/support/temporary_folder.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing::predicted_peak_test {
namespace {

struct Case {
  PlannedModel model;
  PlanSettings settings;
};

Machine this_machine() {
  Machine machine{.ranks_a_host = world_size(), .device = Machine::Device::kCpu};
  machine.memory = int64_t{1} << 33;
  machine.fp32_flops = machine.bf16_flops = 1e10;
  machine.memory_bandwidth = 1e10;
  machine.in_host = {1e-5, 1e-9};
  return machine;
}

/// Each strategy, with both layouts, in fp32 and bf16.
std::vector<PlanSettings> plain_settings() {
  std::vector<PlanSettings> all;
  for (const auto& row : kStrategies) {
    PlanSettings settings{.strategy = row.strategy, .rows = 2};
    settings.optimizer = "AdamW";
    auto& mesh = settings.mesh;
    (row.strategy == tessera::Strategy::kNoShard ? mesh.replicate : mesh.shard) = world_size();
    if (row.outer) {
      if (world_size() < 4) continue; // one of the dims would have one rank
      mesh = {.replicate = 2, .shard = world_size() / 2};
    }
    for (const auto layout : {BufferLayout::kRagged, BufferLayout::kPerParameter}) {
      for (const auto precision : {PlanPrecision::kFp32, PlanPrecision::kBf16Mixed}) {
        settings.layout = layout;
        settings.precision = precision;
        all.push_back(settings);
      }
    }
  }
  return all;
}

/// A setting with what else it can have.
std::vector<PlanSettings> variants(const PlanSettings& plain, const PlannedModel& model) {
  std::vector<PlanSettings> all(4, plain);
  all[1].recompute = true;
  all[2].accumulation = 2;
  all[2].optimizer = "Lion";
  all[3].rows = 5;
  all[3].optimizer = "Momentum";
  all[3].max_grad_norm = 0;
  all.push_back(all[1]);
  all.back().keeps = RecomputeKeeps::kSecondProducts;
  if (plain.strategy == tessera::Strategy::kFullShard && plain.precision == PlanPrecision::kFp32) {
    all.push_back(plain);
    all.back().offload = OffloadPolicy::Memory::kFiles;
  }
  if (model.tensor_parallel && plain.strategy == tessera::Strategy::kFullShard) {
    all.push_back(plain);
    all.back().mesh = {.shard = world_size() / 2, .tp = 2};
  }
  return all;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const auto& model : planned::models()) {
    for (const auto& plain : plain_settings()) {
      for (const auto& settings : variants(plain, model)) all.push_back({model, settings});
    }
  }
  return all;
}

bool is_plain(const Case& each) {
  return each.model.name == "transformer" && each.settings.strategy == tessera::Strategy::kFullShard &&
         !each.settings.recompute && each.settings.layout == BufferLayout::kRagged && each.settings.accumulation == 1 &&
         each.settings.rows == 2;
}

int64_t held_peak(const Case& tested, const std::string& folder) {
  HeldMemory held;
  torch::manual_seed(0);
  internal::PlannedTraining training(tested.model, tested.settings, torch::kCPU, folder);
  for (int warm_up = 0; warm_up < 3; ++warm_up) training.step();
  held.forget_peak();
  training.step();
  return held.peak();
}

void expect_near(const Case& tested, const std::string& folder) {
  SCOPED_TRACE(tested.model.name + ": " + tested.settings.to_string());
  const auto predicted = predict(tested.model, this_machine(), tested.settings);
  const auto held = held_peak(tested, folder);
  EXPECT_NEAR(static_cast<double>(predicted.peak()) / static_cast<double>(held), 1, 0.03) << held << predicted.to_string();
}

TEST(PredictedPeak, IsWithinThreePercentOfWhatIsHeld) {
  const TemporaryFolder folder;
  for (const auto& tested : sweep(cases(), 14, is_plain)) expect_near(tested, folder.path());
}

/// A CPU with instructions for matrices multiplies in fp8 by a kernel whose own memory nothing tells of. Others multiply copies.
bool has_own_float8_kernel() { return at::globalContext().userEnabledMkldnn() && at::cpu::init_amx(); }

/// Each model, with products in fp8 of all strategies.
std::vector<Case> float8_cases() {
  std::vector<Case> all;
  for (const auto& model : planned::models()) {
    for (auto settings : plain_settings()) {
      if (settings.layout != BufferLayout::kRagged) continue;
      for (const auto scaling : {Float8Scaling::kTensor, Float8Scaling::kRows}) {
        settings.float8 = scaling;
        settings.recompute = false;
        all.push_back({model, settings});
        settings.recompute = true;
        all.push_back({model, settings});
        if (settings.strategy != tessera::Strategy::kFullShard) continue;
        if (settings.precision == PlanPrecision::kFp32) {
          all.push_back({model, settings});
          all.back().settings.offload = OffloadPolicy::Memory::kFiles;
        }
        if (scaling == Float8Scaling::kTensor) {
          all.push_back({model, settings});
          all.back().settings.float8_gather = true;
        }
        if (!model.tensor_parallel) continue;
        all.push_back({model, settings});
        all.back().settings.mesh = {.shard = world_size() / 2, .tp = 2};
      }
    }
  }
  return all;
}

TEST(PredictedPeak, KnowsTheCopiesOfProductsInFloat8) {
  if (has_own_float8_kernel()) GTEST_SKIP() << "this CPU has a kernel of its own";
  const TemporaryFolder folder;
  for (const auto& tested : sweep(float8_cases(), 8)) expect_near(tested, folder.path());
}

/// Of what stands in a config of Hugging Face's: 8 heads of queries, and fewer of keys.
PlannedModel llama(int64_t key_heads) {
  const TemporaryFolder folder;
  folder.write("config.json", configs::llama(128, 320, 3, 8, key_heads, 503).dump());
  return read_model(folder.path(), {.sequence = 24});
}

PlanSettings on_line() {
  PlanSettings settings{.precision = PlanPrecision::kFp32, .rows = 2};
  settings.mesh = {.tp = world_size()};
  return settings;
}

int64_t sent_bytes() {
  int64_t bytes = 0;
  for (int kind = 0; kind < kCollectiveKinds; ++kind) bytes += process_context().count(static_cast<CollectiveKind>(kind)).bytes;
  return bytes;
}

/// The peak is near, and the bytes of a step are those of the real one. Those of scales of rows are near: they may be left in
/// parts.
void expect_same_step(const Case& tested, const std::string& folder) {
  expect_near(tested, folder);
  SCOPED_TRACE(tested.model.name + ": " + tested.settings.to_string());
  internal::PlannedTraining training(tested.model, tested.settings, torch::kCPU);
  for (int warm_up = 0; warm_up < 3; ++warm_up) training.step();
  process_context().reset_counters();
  training.step();
  const auto predicted = predict(tested.model, this_machine(), tested.settings).bytes_sent, sent = sent_bytes();
  const bool is_exact = tested.settings.float8 != Float8Scaling::kRows;
  EXPECT_NEAR(static_cast<double>(predicted), static_cast<double>(sent), is_exact ? 0 : 0.03 * static_cast<double>(sent));
}

/// Each rank has the key heads of its group alone.
TEST(PredictedPeak, KnowsGroupsOfKeyHeads) {
  const TemporaryFolder folder;
  for (const int64_t key_heads : {world_size() / 2, world_size()}) {
    for (const bool sequence : {false, true}) {
      for (const bool recomputes : {false, true}) {
        auto settings = on_line();
        settings.sequence_parallel = sequence;
        settings.recompute = recomputes;
        expect_same_step({llama(key_heads), settings}, folder.path());
      }
    }
  }
  // Four ranks with two key heads compute one each, as with four.
  const auto flops = [](int64_t key_heads) { return predict(llama(key_heads), this_machine(), on_line()).flops; };
  if (world_size() == 4) EXPECT_EQ(flops(2), flops(4));
  EXPECT_GT(flops(8), flops(world_size()));
}

/// Under sequence parallelism codes are gathered, and no numbers.
TEST(PredictedPeak, KnowsGathersOfCodes) {
  const TemporaryFolder folder;
  for (const auto scaling : {Float8Scaling::kTensor, Float8Scaling::kRows}) {
    for (const bool recomputes : {false, true}) {
      auto settings = on_line();
      settings.sequence_parallel = true;
      settings.float8 = scaling;
      settings.recompute = recomputes;
      if (has_own_float8_kernel()) GTEST_SKIP() << "this CPU has a kernel of its own";
      expect_same_step({llama(world_size()), settings}, folder.path());
    }
  }
}

struct Held {
  int64_t peak = 0, gathers = 0;
};

/// What the rank of a real pipeline holds that holds most, and the most that one gathers.
Held held_by_pipeline(const Case& tested, const std::string& folder) {
  const auto& settings = tested.settings;
  HeldMemory held;
  torch::manual_seed(0);
  const auto module = tested.model.build();
  const internal::PlannedMesh planned(settings, torch::kCPU);
  const auto& mesh = planned.all;
  const PassSettings pass{.rows = settings.rows, .recompute = settings.recompute, .keeps = settings.keeps};
  const auto schedule = pipeline_schedule(
      settings.schedule,
      {.ranks = settings.mesh.pp, .micro_batches = settings.accumulation, .chunks = internal::chunks_of(settings)});
  auto stages = split(tested.model.layers(*module, pass), mesh["pp"], {.rank_of_stage = schedule.rank_of_stage});
  internal::shard_planned(stages, *module, tested.model, planned, internal::planned_options(settings, folder));
  Pipeline pipeline(stages, settings.schedule, tested.model.pipeline_loss,
                    {.data_mesh = mesh["shard"], .resident_stages = settings.resident_stages});
  const auto optimizer = internal::make_planned_optimizer(settings.optimizer, *stages.module);
  for (int step = 0; step < 4; ++step) {
    if (step == 3) held.forget_peak();
    process_context().reset_counters();
    optimizer->zero_grad();
    std::vector<PipelineValue> micro_batches;
    for (int64_t i = 0; i < settings.accumulation; ++i) micro_batches.push_back(tested.model.batch(pass, torch::kCPU));
    pipeline.step(micro_batches);
    clip_grad_norm_(stages, settings.max_grad_norm);
    tessera::step(*optimizer);
  }
  const auto gathers = process_context().count(CollectiveKind::kAllGather).calls - 1; // one compares what the ranks were given
  auto most = torch::tensor({held.peak(), gathers}, torch::kLong);
  mesh.flatten().communicator()->all_reduce(most, ReduceOp::kMax, "peak").wait();
  return {most[0].item<int64_t>(), most[1].item<int64_t>()};
}

/// Returns the gathers of the rank that has most.
int64_t expect_pipeline_near(const PlannedModel& model, const PlanSettings& settings, const std::string& folder) {
  SCOPED_TRACE(settings.to_string());
  const auto predicted = predict(model, this_machine(), settings);
  const auto held = held_by_pipeline({model, settings}, folder);
  EXPECT_NEAR(static_cast<double>(predicted.peak()) / static_cast<double>(held.peak), 1, 0.03)
      << held.peak << predicted.to_string();
  // Ranks that step over files tell each other whether that failed.
  if (settings.offload == OffloadPolicy::Memory::kDevice) EXPECT_EQ(predicted.gathers, held.gathers);
  return held.gathers;
}

TEST(PredictedPeak, OfAPipelineIsThatOfItsFullestRank) {
  const auto model = planned::models()[1];
  const TemporaryFolder folder;
  const auto expect_near = [&](const PlanSettings& settings) { expect_pipeline_near(model, settings, folder.path()); };
  for (const auto schedule : {PipelineScheduleKind::k1F1B, PipelineScheduleKind::kGPipe, PipelineScheduleKind::kZeroBubbleH1}) {
    for (const bool recomputes : {false, true}) {
      PlanSettings settings{.precision = PlanPrecision::kFp32, .rows = 2, .accumulation = 4, .recompute = recomputes};
      settings.mesh = {.pp = 2, .shard = world_size() / 2};
      settings.schedule = schedule;
      expect_near(settings);
      settings.offload = OffloadPolicy::Memory::kFiles;
      expect_near(settings);
    }
  }
}

TEST(PredictedPeak, KnowsHowManyStagesAreGathered) {
  const auto model = planned::transformer("transformer", 1003, 128, 7, /*is_tied=*/false);
  const TemporaryFolder folder;
  using Kind = PipelineScheduleKind;
  for (const auto schedule : sweep(std::vector{Kind::kInterleaved1F1B, Kind::kLoopedBFS, Kind::kZeroBubbleV}, 1)) {
    std::vector<int64_t> gathers;
    for (const int64_t stages : {0, 1, 2}) {
      PlanSettings settings{.precision = PlanPrecision::kFp32, .rows = 2, .accumulation = 4};
      settings.mesh = {.pp = 2, .shard = world_size() / 2};
      settings.schedule = schedule;
      settings.resident_stages = stages;
      gathers.push_back(expect_pipeline_near(model, settings, folder.path()));
    }
    if (world_size() > 2) EXPECT_GT(gathers[1], gathers[0]);
  }
}

} // namespace
} // namespace tessera::testing::predicted_peak_test
