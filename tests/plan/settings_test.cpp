#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <tessera/plan/settings.h>

#include <tessera/tests/support/matchers.h>

namespace tessera::testing::settings_test {
namespace {

TEST(PlanSettings, AreReadByPeople) {
  PlanSettings settings{.mesh = {.shard = 8, .tp = 2}, .rows = 4, .accumulation = 2, .recompute = true};
  EXPECT_EQ(settings.to_string(), "full, shard 8 x tp 2, 4 rows x 2, bf16_mixed, recompute, AdamW");
  settings.keeps = RecomputeKeeps::kSecondProducts;
  settings.float8 = Float8Scaling::kRows;
  EXPECT_EQ(settings.to_string(), "full, shard 8 x tp 2, 4 rows x 2, bf16_mixed, selective recompute, fp8 by rows, AdamW");
  EXPECT_EQ(settings.global_rows(), 64);
  EXPECT_EQ(settings.mesh.ranks(), 16);
  EXPECT_EQ(PlanSettings().to_string(), "full, 1 rank, 1 row, bf16_mixed, AdamW");
}

TEST(PlanSettings, NamePrecisions) {
  for (const auto* name : {"fp32", "bf16_mixed", "deepspeed", "bf16_full"}) EXPECT_EQ(to_string(plan_precision(name)), name);
  EXPECT_THROWS_WITH(plan_precision("fp64"), "must be fp32, bf16_mixed, deepspeed or bf16_full");
}

TEST(PlanSettings, SayWhatCannotBe) {
  const auto check = [](const PlanSettings& settings) { settings.check(); };
  EXPECT_THROWS_WITH(check({.rows = 0}), "rows is 0");
  EXPECT_THROWS_WITH(check({.mesh = {.tp = -1}}), "tp is -1");
  EXPECT_THROWS_WITH(check({.mesh = {.replicate = 2, .shard = 2}}), "strategy full takes no replicas, but replicate is 2");
  EXPECT_THROWS_WITH(check({.mesh = {.shard = 2}, .strategy = tessera::Strategy::kHybridShard}), "hybrid needs replicas");
  EXPECT_THROWS_WITH(check({.mesh = {.shard = 2}, .strategy = tessera::Strategy::kNoShard}), "shard is 2");
  EXPECT_THROWS_WITH(check({.optimizer = "AdamW8bits"}), "did you mean \"AdamW8bit\"?");
  EXPECT_THROWS_WITH(check({.chunks = -2}), "chunks is -2");
  EXPECT_THROWS_WITH(check({.mesh = {.pp = 2}, .resident_stages = -1}), "resident_stages is -1, but must not be negative");
  EXPECT_THROWS_WITH(check({.context_order = PartOrder::kContiguous}), "no sequence is split: cp is 1");
  EXPECT_THROWS_WITH(check({.float8_gather = true}), "a scale a tensor, but float8 is unset");
  EXPECT_THROWS_WITH(check({.float8 = Float8Scaling::kRows, .float8_gather = true}), "a scale a tensor, but float8 is by rows");
  EXPECT_THROWS_WITH(check({.strategy = tessera::Strategy::kNoShard, .float8 = Float8Scaling::kTensor, .float8_gather = true}),
                     "strategy no-shard gathers no parameter");
  EXPECT_THROWS_WITH(check({.mesh = {.tp = 2}, .float8 = Float8Scaling::kTensor, .float8_gather = true}),
                     "gathered in fp8: tp is 2");
  EXPECT_THAT((PlanSettings{.float8 = Float8Scaling::kTensor, .float8_gather = true}.to_string()),
              ::testing::HasSubstr("fp8, gathered in fp8"));
  EXPECT_THROWS_WITH(check({.resident_stages = 2}), "resident_stages is 2, but there are no stages: pp is 1");
  EXPECT_THAT((PlanSettings{.mesh = {.pp = 2}, .resident_stages = 2}.to_string()), ::testing::HasSubstr(", 2 stages gathered"));
  EXPECT_THROWS_WITH(check({.keeps = RecomputeKeeps::kSecondProducts}), "but recompute is false");
}

} // namespace
} // namespace tessera::testing::settings_test
