// Damaged configs end in an error, and a resolved config is the same one.
#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>
#include <tessera/training/train_config.h>

namespace tessera::testing::config_fuzz_test {
namespace {

const std::vector<std::string> kConfigs{
    R"({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": "true"}, // a comment
  "zero_optimization": {"stage": 2, "overlap_comm": true, "reduce_bucket_size": 2e8}})",
    R"({"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
  "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 12, "hysteresis": 3, "min_loss_scale": 2},
  "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/x"}, "zero_hpz_partition_size": 4},
  "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.8, 0.99], "weight_decay": 3e-7}},
  "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 50}}, "steps_per_print": 7})",
    R"({"train_batch_size": 16, "optimizer": {"type": "Muon", "params": {"lr": 0.02}}, "tessera": {"mesh": {"tp": 2, "cp": 2},
  "strategy": "full", "stop_after": ["100 steps", "3 h"], "save": {"folder": "f", "every": "10 steps", "keep": 3, "best": "v"},
  "evaluate": {"every": "5 steps"}, "early_stop": {"metric": "v", "patience": 4, "min_change": 1e-3}, "seed": 7, "layout":
  "per-parameter", "plan": {"a.*": "colwise packed 3", "b": "rowwise"}, "schedule": {"type": "cosine", "warmup_steps": 5,
  "total_steps": 20}, "model": {"layers": 3, "ü": ["x", null]}, "log": {"jsonl": "l", "every": 2}, "keep_in_fp32": "norm"}})"};

/// Of the config with this number: what fills its "auto", and nothing that another value could differ from.
TrainArguments arguments_of(size_t number) {
  if (number != 1) return {.ranks = 8};
  return {.ranks = 8, .micro_batch_size = 2, .accumulation_steps = 2, .max_grad_norm = 0.5, .learning_rate = 1e-3};
}

/// All that a program takes of it.
std::string described(const TrainConfig& config) {
  const auto& sharding = config.sharding;
  const auto& trainer = config.trainer;
  const auto& scaler = trainer.scaler;
  std::ostringstream text;
  text << config.resolved() << ' ' << config.batch.train << ' ' << config.batch.micro << ' ' << config.batch.accumulation << ' '
       << row_of(sharding.strategy).name << ' ' << int(sharding.layout) << ' ' << int(sharding.offload.memory) << ' '
       << sharding.offload.folder << ' ' << sharding.recompute << ' ' << config.precision.name << ' ' << config.optimizer.index()
       << ' ' << config.schedule.index() << ' ' << trainer.micro_batches << ' ' << trainer.max_grad_norm << ' ' << scaler.enabled
       << ' ' << scaler.init_scale << ' ' << scaler.growth_interval << ' ' << scaler.hysteresis << ' ' << scaler.min_scale << ' '
       << int(trainer.non_finite) << ' ' << trainer.seed << ' ' << trainer.stop_after.steps << ' ' << trainer.stop_after.epochs
       << ' ' << trainer.stop_after.run_time.count() << ' ' << trainer.save.folder << ' ' << trainer.save.every.steps << ' '
       << trainer.save.keep << ' ' << trainer.save.best << ' ' << trainer.evaluate.steps << ' ' << trainer.log.every;
  for (const auto& [dim, ranks] : sharding.mesh) text << ' ' << dim << ' ' << ranks;
  return text.str();
}

/// What is not "auto" any more.
void expect_same_when_resolved(const TrainConfig& config) {
  const auto again = TrainConfig::parse(config.resolved(), {.ranks = 8});
  EXPECT_EQ(described(again), described(config));
  EXPECT_TRUE(differences(config.resolved(), again).empty());
}

TEST(ConfigFuzz, AResolvedConfigIsTheSameOne) {
  for (size_t i = 0; i < kConfigs.size(); ++i) expect_same_when_resolved(TrainConfig::parse(kConfigs[i], arguments_of(i)));
}

const std::vector<std::string> kPieces{"",
                                       "{",
                                       "}",
                                       "[",
                                       "]",
                                       ",",
                                       ":",
                                       "\"",
                                       "\"auto\"",
                                       "null",
                                       "true",
                                       "-1",
                                       "0",
                                       "1e999",
                                       "-9223372036854775808",
                                       "9223372036854775807",
                                       "18446744073709551615",
                                       "1e308",
                                       "0.5",
                                       "\"nan\"",
                                       "\"-inf\"",
                                       "\"\\ud800\"",
                                       "\xff",
                                       "/*",
                                       "//",
                                       "#",
                                       "{\"a\": 1}",
                                       "[[[[[[[[[[[[[[[[[[",
                                       "\"stage\"",
                                       "\"4294967296 steps\"",
                                       "4294967296",
                                       "\"params\"",
                                       "\"\""};

/// One piece of it is replaced by something that is often wrong.
std::string damaged(std::string text, std::mt19937& random) {
  const auto draw = [&](size_t end) { return std::uniform_int_distribution<size_t>(0, end - 1)(random); };
  const auto& piece = kPieces[draw(kPieces.size())];
  if (draw(3) == 0) return text.insert(draw(text.size()), piece);
  auto begin = text.find(':', draw(text.size())); // a value
  if (begin == std::string::npos) begin = text.find(':');
  const auto end = text.find_first_of(",}]", begin);
  return text.replace(begin + 1, end - begin - 1, piece);
}

TEST(ConfigFuzz, DamageIsAnErrorOrAnotherConfig) {
  auto random = next_sweep_generator();
  const auto tries = full_run() ? 100'000 : 3000;
  const auto enough = tries / 50; // of what is still a config
  int read = 0;
  for (int i = 0; (i < tries || read < enough) && i < 10 * tries; ++i) {
    const auto number = static_cast<size_t>(i) % kConfigs.size();
    auto text = kConfigs[number];
    for (int j = 0; j <= i % 3; ++j) text = damaged(std::move(text), random);
    SCOPED_TRACE(text);
    std::optional<TrainConfig> config;
    try {
      config = TrainConfig::parse(text, arguments_of(number), "ds.json");
    } catch (const c10::Error& error) {
      ASSERT_NE(std::string(error.what_without_backtrace()).find("ds.json"), std::string::npos) << error.what_without_backtrace();
      continue;
    }
    ++read;
    ASSERT_NO_FATAL_FAILURE(expect_same_when_resolved(*config));
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GE(read, enough);
}

TEST(ConfigFuzz, ANumberThatIsNotFiniteIsAnError) {
  for (const auto* number : {R"("nan")", R"("-inf")", R"("1e999")"}) {
    const auto optimizer = R"("optimizer": {"type": "AdamW", "params": {"weight_decay": )" + std::string(number) + "}}";
    EXPECT_THROWS_WITH(TrainConfig::parse(R"({"train_batch_size": 8, )" + optimizer + "}"), "optimizer.params.weight_decay");
  }
}

TEST(ConfigFuzz, AStrategyThatIsNullIsThatOfTheStage) {
  const auto config = TrainConfig::parse(R"({"train_batch_size": 8, "tessera": {"strategy": null}})");
  EXPECT_EQ(row_of(config.sharding.strategy).name, row_of(tessera::Strategy::kNoShard).name);
}

TEST(ConfigFuzz, AMeshOfTooManyRanksIsAnError) {
  for (const auto* mesh : {R"("replicate": 4294967296, "shard": 4294967296)", R"("cp": 4611686018427387904, "tp": 4)"}) {
    EXPECT_THROWS_WITH(TrainConfig::parse(std::string(R"({"train_batch_size": 8, "tessera": {"mesh": {)") + mesh + "}}}"),
                       "more ranks than can be counted");
  }
}

} // namespace
} // namespace tessera::testing::config_fuzz_test
