#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <tessera/plan/search.h>
#include <tessera/training/train_config.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <map>
#include <string>

#include <tessera/tests/plan/test_models.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::search_test {
namespace {

Machine hosts_of_four(int64_t hosts) {
  Machine machine{.name = "hosts of four", .hosts = hosts, .ranks_a_host = 4};
  machine.memory = int64_t{1} << 34;
  machine.fp32_flops = 1e12;
  machine.bf16_flops = 4e12;
  machine.memory_bandwidth = 1e11;
  machine.in_host = {1e-6, 1e-11};
  machine.between_hosts = {1e-5, 1e-9};
  return machine;
}

PlannedModel small() { return planned::transformer("small transformer", 251, 64, 4, /*is_tied=*/false); }
PlannedModel plain() {
  return planned::sequence("perceptron", [] { return planned::perceptron({128, 256, 256, 128}); }, {128});
}

TEST(Plan, IsTheFastestThatFits) {
  std::vector<Prediction> all;
  SearchOptions options{.max_rows = 8, .progress = [&](const Prediction& each) { all.push_back(each); }};
  const auto machine = hosts_of_four(1);
  const auto unlimited = plan(plain(), machine, options);
  ASSERT_TRUE(unlimited.best);
  EXPECT_TRUE(unlimited.is_complete);
  EXPECT_EQ(unlimited.stepped, std::ssize(all));
  for (const auto& each : all) EXPECT_LE(each.rows_per_second(), unlimited.best->rows_per_second()) << each.settings.to_string();
  options.budget = unlimited.best->peak() - 1;
  const auto limited = plan(plain(), machine, options);
  ASSERT_TRUE(limited.best);
  EXPECT_LE(limited.best->peak(), options.budget);
  EXPECT_LE(limited.best->rows_per_second(), unlimited.best->rows_per_second());
  for (const auto& each : limited.runners_up) EXPECT_LE(each.rows_per_second(), limited.best->rows_per_second());
}

TEST(Plan, SaysWhatLimitsCost) {
  const auto made = plan(plain(), hosts_of_four(1), {.max_rows = 8});
  ASSERT_EQ(made.limits.size(), 4U);
  EXPECT_EQ(made.limits[0].what, "with recomputation");
  ASSERT_TRUE(made.limits[0].plan);
  EXPECT_LE(made.limits[0].speed, 1);
  EXPECT_EQ(made.limits[3].what, "2 x the memory");
  EXPECT_GE(made.limits[3].speed, 1);
}

/// That nothing was found among few steps does not mean that nothing fits.
TEST(Plan, SaysWhereItsStepsEnded) {
  const auto made = plan(plain(), hosts_of_four(1), {.max_rows = 8, .max_steps = 2});
  ASSERT_TRUE(made.best);
  EXPECT_FALSE(made.is_complete);
  EXPECT_EQ(made.stepped, 3); // one more for limits
  ASSERT_EQ(made.limits.size(), 4U);
  for (const auto& limit : made.limits) {
    EXPECT_FALSE(limit.is_complete) << limit.what;
    if (limit.what.ends_with("x the memory")) EXPECT_TRUE(limit.plan) << limit.what;
  }
  const auto text = made.to_string();
  EXPECT_THAT(text, ::testing::HasSubstr("the search ended at its most steps"));
  EXPECT_THAT(text, ::testing::Not(::testing::HasSubstr("nothing fits")));
}

TEST(Plan, SaysWhatWouldFit) {
  const auto made = plan(plain(), hosts_of_four(1), {.budget = 1000, .max_rows = 2});
  EXPECT_FALSE(made.best);
  ASSERT_TRUE(made.smallest);
  EXPECT_GT(made.smallest->peak(), 1000);
  EXPECT_THAT(made.to_string(), ::testing::HasSubstr("nothing fits"));
  EXPECT_THROWS_WITH(made.to_config(), "nothing fits 1000 bytes a rank");
  EXPECT_TRUE(plan(plain(), hosts_of_four(1), {.budget = made.smallest->peak(), .max_rows = 2}).best);
}

TEST(Plan, KeepsTheGlobalBatch) {
  const auto made = plan(plain(), hosts_of_four(1), {.global_rows = 24, .max_rows = 4});
  ASSERT_TRUE(made.best);
  EXPECT_EQ(made.best->global_rows(), 24);
  for (const auto& each : made.runners_up) EXPECT_EQ(each.global_rows(), 24);
  EXPECT_THROWS_WITH(plan(plain(), hosts_of_four(1), {.global_rows = 7, .max_rows = 4, .meshes = {{.shard = 4}}}),
                     "no setting has 7 rows a step");
}

TEST(Plan, IsAConfigOfTheTrainer) {
  SearchOptions options{.max_rows = 1};
  options.meshes = {{.replicate = 2, .shard = 4}, {.shard = 8}, {.replicate = 8}, {.shard = 4, .tp = 2}, {.pp = 2, .shard = 4}};
  options.optimizers = {"AdamW8bit", "Momentum"};
  const auto machine = hosts_of_four(2);
  std::vector<Prediction> all;
  options.progress = [&](const Prediction& each) { all.push_back(each); };
  const auto made = plan(small(), machine, options);
  ASSERT_TRUE(made.best);
  for (const auto& each : all) {
    const auto config = TrainConfig::parse(config_of(each), {.ranks = 8});
    const auto& settings = each.settings;
    EXPECT_EQ(config.batch.micro, settings.rows);
    EXPECT_EQ(config.batch.train, settings.global_rows()) << settings.to_string();
    EXPECT_EQ(config.sharding.strategy, settings.strategy) << settings.to_string();
    EXPECT_EQ(config.sharding.recompute, settings.recompute);
    EXPECT_EQ(config.precision.name, to_string(settings.precision));
    EXPECT_TRUE(config.has_optimizer());
  }
}

TEST(Plan, ChoosesHowManyStagesAreGathered) {
  SearchOptions options{.max_rows = 1, .meshes = {{.pp = 2, .shard = 2}, {.shard = 4}}};
  options.strategies = {tessera::Strategy::kFullShard};
  options.schedules = {PipelineScheduleKind::kInterleaved1F1B};
  options.recompute = {false};
  options.resident_stages = {0, 1};
  std::vector<Prediction> all;
  options.progress = [&](const Prediction& each) { all.push_back(each); };
  EXPECT_EQ(plan(small(), hosts_of_four(1), options).considered, 3) << "without stages none are gathered";
  std::map<int64_t, Prediction> pipelines;
  for (const auto& each : all) {
    if (each.settings.mesh.pp > 1) pipelines.emplace(each.settings.resident_stages, each);
    const auto config = TrainConfig::parse(config_of(each), {.ranks = 4});
    EXPECT_EQ(config.sharding.resident_stages, each.settings.resident_stages);
  }
  ASSERT_EQ(pipelines.size(), 2u);
  EXPECT_GT(pipelines.at(1).gathers, pipelines.at(0).gathers);
  EXPECT_LT(pipelines.at(1).memory.unsharded, pipelines.at(0).memory.unsharded);
}

/// What changes nothing is not stepped twice: limits of gathered stages for a rank that has no more of them, what is kept without
/// recomputation, schedules without stages, gathers in fp8 of what is not in it, and values that a list names twice.
TEST(Plan, TriesEachDifferentSettingOnce) {
  using Kind = PipelineScheduleKind;
  SearchOptions options{.max_rows = 1, .meshes = {{.pp = 2, .shard = 2}, {.shard = 4}}};
  options.strategies = {tessera::Strategy::kFullShard};
  options.recompute = {false, true, false};
  options.keeps = {RecomputeKeeps::kSecondProducts, RecomputeKeeps::kNothing};
  options.float8 = {std::nullopt, Float8Scaling::kTensor};
  options.float8_gather = {true, false};
  options.schedules = {Kind::k1F1B, Kind::kInterleaved1F1B};
  options.resident_stages = {0, 1, 2, 3};
  options.max_steps = 1000;
  std::map<std::string, int> stepped;
  options.progress = [&](const Prediction& each) { ++stepped[each.settings.to_string()]; };
  const auto made = plan(small(), hosts_of_four(1), options);
  const int64_t of_blocks = 3 * 3;                         // recomputed or not, and what is kept; in fp8 or not, and gathered so
  const int64_t pipelines = 2 + 3;                         // 1F1B and interleaved, without a limit and with each that there is
  EXPECT_EQ(made.considered, of_blocks * (pipelines + 1)); // and without stages
  for (const auto& [settings, times] : stepped) EXPECT_EQ(times, 1) << settings;
  options.resident_stages.clear();
  EXPECT_THROWS_WITH(plan(small(), hosts_of_four(1), options), "plan: resident_stages is empty");
}

/// Limits that the search takes for one are: a rank has no more stages.
TEST(Plan, LimitsBeyondTheStagesOfARankAreOneSetting) {
  using Kind = PipelineScheduleKind;
  for (const auto& [schedule, stages] : {std::pair(Kind::k1F1B, 1), std::pair(Kind::kInterleaved1F1B, 2)}) {
    PlanSettings settings{.mesh = {.pp = 2, .shard = 2}, .accumulation = 4, .schedule = schedule};
    const auto none = predict(small(), hosts_of_four(1), settings);
    settings.resident_stages = stages;
    const auto all = predict(small(), hosts_of_four(1), settings);
    settings.resident_stages = stages + 1;
    const auto more = predict(small(), hosts_of_four(1), settings);
    EXPECT_DOUBLE_EQ(more.seconds, all.seconds) << stages;
    for (const auto& each : {more, none}) {
      EXPECT_EQ(each.peak(), all.peak()) << stages;
      EXPECT_EQ(each.gathers, all.gathers) << stages;
      EXPECT_EQ(each.bytes_sent, all.bytes_sent) << stages;
    }
    EXPECT_LE(all.seconds, none.seconds) << "gathers begin with the schedule, not with the first read";
  }
}

TEST(Plan, ChoosesWhatIsKeptAndWhatIsInFp8) {
  SearchOptions options{.max_rows = 1, .meshes = {{.shard = 4}}, .strategies = {tessera::Strategy::kFullShard}};
  options.keeps = {RecomputeKeeps::kNothing, RecomputeKeeps::kSecondProducts};
  options.float8 = {std::nullopt, Float8Scaling::kTensor};
  std::map<std::string, Prediction> all;
  options.progress = [&](const Prediction& each) { all.emplace(each.settings.to_string(), each); };
  const auto made = plan(small(), hosts_of_four(1), options);
  EXPECT_EQ(made.considered, 6) << "without recomputation nothing is kept";
  ASSERT_TRUE(all.contains("full, shard 4, 1 row, bf16_mixed, selective recompute, fp8, AdamW"));
  for (const auto& entry : all) {
    const auto& each = entry.second;
    if (each.settings.keeps != RecomputeKeeps::kNothing)
      EXPECT_THROWS_WITH(config_of(each), "no key for what a recomputation keeps");
    else if (each.settings.float8)
      EXPECT_THROWS_WITH(config_of(each), "no key for products in fp8");
  }
  options.keeps.clear();
  EXPECT_THROWS_WITH(plan(small(), hosts_of_four(1), options), "plan: keeps is empty");
}

TEST(Plan, IsWritten) {
  const auto made = plan(plain(), hosts_of_four(1), {.max_rows = 2});
  const auto json = nlohmann::json::parse(made.to_json());
  EXPECT_EQ(json["format"], "tessera plan");
  EXPECT_EQ(json["best"]["peak"], made.best->peak());
  EXPECT_EQ(json["stepped"], made.stepped);
  EXPECT_THAT(made.to_string(), ::testing::HasSubstr("rows/s"));
}

TEST(Plan, SaysWhatIsRefused) {
  auto model = planned::sequence("odd batch", [] { return planned::perceptron({8, 8}); }, {8});
  model.batch = [](const PassSettings& pass, at::Device device) {
    TORCH_CHECK_VALUE(!pass.recompute, "no recomputation here");
    return PipelineValue(torch::zeros({pass.rows, 8}, torch::TensorOptions().device(device)));
  };
  const auto made = plan(model, hosts_of_four(1), {.max_rows = 1});
  EXPECT_TRUE(made.best);
  EXPECT_GT(made.refused, 0);
  EXPECT_THAT(made.first_refusal, ::testing::HasSubstr("no recomputation here"));
  EXPECT_THAT(made.to_string(), ::testing::HasSubstr("settings were refused, the first: "));
  model.batch = [](const PassSettings&, at::Device) -> PipelineValue { TORCH_CHECK_VALUE(false, "no batch"); };
  EXPECT_THROWS_WITH(plan(model, hosts_of_four(1), {.max_rows = 1}), "no setting can be stepped. The first was ");
}

TEST(Plan, EndsAtItsMostSteps) {
  const auto made = plan(small(), hosts_of_four(1), {.max_rows = 4, .max_steps = 3});
  EXPECT_FALSE(made.is_complete);
  EXPECT_LE(made.stepped, 3 + 1); // a quarter more for limits
  const auto least = plan(small(), hosts_of_four(1), {.budget = 1000, .max_rows = 1}).smallest;
  const auto none = plan(small(), hosts_of_four(1), {.budget = least.value().peak() - 1, .max_rows = 1, .max_steps = 1});
  EXPECT_FALSE(none.best);
  EXPECT_FALSE(none.is_complete);
  EXPECT_THAT(none.to_string(), ::testing::HasSubstr("nothing that was stepped fits"));
}

TEST(Plan, RefusesWhatCannotBe) {
  const auto refuse = [](const SearchOptions& options) { plan(plain(), hosts_of_four(1), options); };
  EXPECT_THROWS_WITH(refuse({.budget = -1}), "budget is -1");
  EXPECT_THROWS_WITH(refuse({.max_rows = 0}), "max_rows is 0");
  EXPECT_THROWS_WITH(refuse({.precisions = {}}), "precisions is empty");
  EXPECT_THROWS_WITH(refuse({.meshes = {{.shard = 3}}}), "no mesh of 4 ranks fits perceptron");
}

} // namespace
} // namespace tessera::testing::search_test
