// Scaler, schedules and batches beside DeepSpeed's own code, which deepspeed_answers.py runs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include <bit>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>

#include <tessera/tests/support/subprocess.h>
#include <tessera/training/config/batch.h>
#include <tessera/training/config/keys/config_key.h>
#include <tessera/training/train_config.h>

namespace tessera::testing::deepspeed_test {
namespace {

using Json = nlohmann::json;

constexpr int64_t kSteps = 5000; // as in the answers
constexpr uint64_t kFnvStart = 0xCBF29CE484222325ULL, kFnvPrime = 0x100000001B3ULL;

/// FNV-1a over doubles.
class Digest {
 public:
  void add(double value) {
    const auto bits = std::bit_cast<uint64_t>(value);
    for (int shift = 0; shift < 64; shift += 8) state_ = (state_ ^ ((bits >> shift) & 0xFF)) * kFnvPrime;
    if (first_.size() < 8) first_.push_back(value);
  }
  /// The same numbers as in the answer, all of them.
  void compare(const Json& answer) const {
    EXPECT_EQ(first_, answer["first"].get<std::vector<double>>());
    std::ostringstream text;
    text << std::hex << std::setw(16) << std::setfill('0') << state_;
    EXPECT_EQ(text.str(), answer["digest"].get<std::string>());
  }

 private:
  uint64_t state_ = kFnvStart;
  std::vector<double> first_;
};

/// The same numbers in Python and in C++.
class Draw {
 public:
  explicit Draw(uint64_t seed) : state_(seed) {}
  int64_t below(int64_t end) {
    state_ = state_ * 6364136223846793005ULL + 1442695040888963407ULL;
    return static_cast<int64_t>((state_ >> 33) % static_cast<uint64_t>(end));
  }

 private:
  uint64_t state_;
};

std::string content_of(const std::string& path) {
  std::stringstream content;
  content << std::ifstream(path).rdbuf();
  return content.str();
}

const Json& answers() {
  static const auto json = Json::parse(content_of(TESSERA_DEEPSPEED_ANSWERS));
  return json;
}

std::vector<Json> cases_of(const std::string& kind) {
  std::vector<Json> cases;
  for (const auto& each : answers()["cases"]) {
    if (each["kind"] == kind) cases.push_back(each);
  }
  EXPECT_FALSE(cases.empty());
  return cases;
}

/// A config with the case's fp16 block.
GradScaler scaler_of(const Json& settings, int64_t stage) {
  Json fp16{{"enabled", true}};
  for (const auto* key : {"initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale"})
    fp16[key] = settings[key];
  const Json config{{"train_batch_size", 1}, {"fp16", fp16}, {"zero_optimization", {{"stage", stage}}}};
  return GradScaler(TrainConfig::parse(config.dump()).trainer.scaler);
}

void replay(const Json& settings, int64_t stage) {
  SCOPED_TRACE(settings.dump());
  auto scaler = scaler_of(settings, stage);
  const auto weight = torch::zeros({1}).requires_grad_();
  torch::optim::SGD optimizer({weight}, 0.1);
  Draw draw(settings["seed"]);
  Digest digest;
  Json error_at;
  for (int64_t step = 0; step < kSteps && error_at.is_null(); ++step) {
    bool overflow = draw.below(1000) < settings["permille"].get<int64_t>();
    if (scaler.get_scale() >= std::exp2(40)) overflow = true;
    if (scaler.get_scale() <= settings["stays_above"].get<double>()) overflow = false;
    scaler.scale(torch::zeros({}));
    weight.mutable_grad() = torch::full({1}, overflow ? std::numeric_limits<float>::infinity() : 1.F);
    EXPECT_EQ(scaler.step(optimizer), !overflow);
    try {
      scaler.update();
      digest.add(scaler.get_scale());
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what_without_backtrace(), ::testing::HasSubstr("with the loss scale at its minimum"));
      error_at = step;
    }
  }
  digest.compare(settings);
  EXPECT_EQ(error_at, settings["error_at"]);
}

TEST(DeepSpeed, LossScalesAreTheSame) {
  for (const auto& each : cases_of("scaler")) replay(each, 2);
}

TEST(DeepSpeed, LossScalesWithoutZeroAreTheSame) {
  for (const auto& each : cases_of("stage0")) replay(each, 0);
}

TEST(DeepSpeed, SchedulesAreTheSame) {
  for (const auto& each : cases_of("schedule")) {
    SCOPED_TRACE(each.dump());
    const Json config{{"train_batch_size", 1},
                      {"optimizer", {{"type", "SGD"}, {"params", {{"lr", 0.013}}}}},
                      {"scheduler", {{"type", each["type"]}, {"params", each["params"]}}}};
    const auto parsed = TrainConfig::parse(config.dump());
    const auto optimizer = parsed.make_optimizer(std::vector<torch::Tensor>{torch::zeros({1})});
    const auto schedule = parsed.make_schedule(*optimizer);
    Digest digest;
    for (int64_t step = 0; step < kSteps; ++step) {
      digest.add(optimizer->param_groups()[0].options().get_lr());
      schedule->step();
    }
    digest.compare(each);
  }
}

TEST(DeepSpeed, BatchesAreTheSame) {
  const auto settings = cases_of("batch").front();
  Draw draw(settings["seed"]);
  Digest digest;
  int64_t refused = 0;
  for (int64_t step = 0; step < kSteps; ++step) {
    const auto ranks = 1 + draw.below(16);
    const auto number = [&](int64_t end) {
      return draw.below(4) > 0 ? std::optional<int64_t>(1 + draw.below(end)) : std::nullopt;
    };
    internal::GivenBatch given;
    given.train = number(256);
    given.micro = number(16);
    given.accumulation = number(8);
    if (draw.below(2) == 0 && given.train) {
      const auto times = 1 + draw.below(3);
      given.train = ranks * given.micro.value_or(1) * given.accumulation.value_or(1) * times;
    }
    BatchConfig batch{-1, -1, -1};
    try {
      batch = internal::complete_batch(given, ranks, "config");
    } catch (const c10::Error&) {
      ++refused;
    }
    for (const auto each : {batch.train, batch.micro, batch.accumulation}) digest.add(static_cast<double>(each));
  }
  digest.compare(settings);
  EXPECT_EQ(refused, settings["refused"].get<int64_t>());
}

/// Each key that DeepSpeed asks for has a row, with its default.
TEST(DeepSpeed, KeysAndDefaultsAreTheSame) {
  size_t compared = 0;
  for (const auto& answer : cases_of("keys")) {
    const auto keys = answer["keys"];
    for (const auto& [name, value] : keys.items()) {
      const auto block = answer["block"].get<std::string>();
      const auto full = block.empty() ? name : block + "." + name;
      SCOPED_TRACE(full);
      const auto* key = internal::find_key(full);
      ASSERT_NE(key, nullptr);
      if (value.is_null()) continue;
      EXPECT_EQ(Json::parse(key->standard.empty() ? "null" : key->standard), value);
      ++compared;
    }
  }
  EXPECT_GT(compared, 80);
}

/// What is kept beside this file is what DeepSpeed says today.
TEST(DeepSpeed, AnswersAreOfItsOwnCode) {
  const std::string sources = TESSERA_DEEPSPEED_SOURCES, version = sources + "/version.txt";
  if (!std::filesystem::exists(version))
    GTEST_SKIP() << "no sources of DeepSpeed in " << sources << ": scripts/setup --references";
  const auto result = run_program(
      {TESSERA_PYTHON, TESSERA_REMEMBERED_SCRIPT, "--key", version, "--", TESSERA_PYTHON, TESSERA_DEEPSPEED_SCRIPT, sources}, {},
      std::chrono::seconds(120));
  ASSERT_EQ(result.status, 0) << result.output;
  EXPECT_EQ(result.output, content_of(TESSERA_DEEPSPEED_ANSWERS));
}

} // namespace
} // namespace tessera::testing::deepspeed_test
