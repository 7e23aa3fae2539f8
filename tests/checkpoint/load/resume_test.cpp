// Jobs of other sizes and strategies go on with the loss curve of an uninterrupted one.
#include <gtest/gtest.h>

#include <cmath>

#include <tessera/tests/support/subprocess.h>
#include <tessera/tests/support/sweep.h>
#include <tessera/tests/support/temporary_folder.h>

namespace tessera::checkpoint::resume_test {
namespace {

struct Stage {
  int ranks;
  std::string strategy;
};

constexpr int kStepsPerStage = 4;

std::vector<double> losses_of(const std::vector<Stage>& stages, int steps_per_stage, const std::string& training = "adamw") {
  const testing::TemporaryFolder root;
  std::vector<double> losses;
  int last_step = 0;
  for (const auto& [ranks, strategy] : stages) {
    last_step += steps_per_stage;
    const auto result = testing::run_program({testing::program_folder() + "/checkpoint_resume_helper", "--ranks",
                                              std::to_string(ranks), root.path(), strategy, std::to_string(last_step), training},
                                             {}, std::chrono::seconds(60), testing::Start::kForked);
    EXPECT_EQ(result.status, 0) << result.output;
    std::istringstream output(result.output);
    std::string word;
    int64_t step = 0;
    for (double loss = 0; output >> word;) {
      if (word == "loss" && output >> step >> loss) losses.push_back(loss);
    }
  }
  return losses;
}

double largest_difference(const std::vector<double>& losses, const std::vector<double>& expected) {
  EXPECT_EQ(losses.size(), expected.size());
  if (losses.size() != expected.size()) return INFINITY;
  double worst = 0;
  for (size_t step = 0; step < losses.size(); ++step) worst = std::max(worst, std::abs(losses[step] - expected[step]));
  return worst;
}

TEST(Resume, TheLossCurveGoesOnAtOtherWorldSizesAndStrategies) {
  const auto expected = losses_of({{1, "plain"}}, 3 * kStepsPerStage);
  ASSERT_EQ(expected.size(), 3 * kStepsPerStage);
  EXPECT_LT(expected.back(), expected.front());
  std::vector<std::vector<Stage>> runs{
      {{4, "full-per-parameter"}, {2, "no-shard"}, {3, "full-ragged"}},
      {{4, "hybrid-ragged"}, {1, "plain"}, {4, "hybrid-per-parameter"}},
      {{3, "no-shard"}, {4, "full-ragged"}, {2, "full-per-parameter"}},
      {{1, "full-ragged"}, {2, "full-ragged"}, {4, "no-shard"}},
  };
  runs = testing::sweep(runs, 1);
  runs.push_back({{4, "full-ragged"}, {2, "full-ragged"}, {3, "full-ragged"}});
  double worst = 0;
  for (const auto& stages : runs) worst = std::max(worst, largest_difference(losses_of(stages, kStepsPerStage), expected));
  std::printf("largest difference of a loss: %.2e\n", worst);
  EXPECT_LE(worst, 1e-5);
}

class ResumeOwn : public ::testing::TestWithParam<std::string> {};

// A class of the test's own, two optimizers over one model, LBFGS, and the two optimizers of a GAN.
TEST_P(ResumeOwn, TheLossCurveGoesOnAtOtherWorldSizes) {
  const auto expected = losses_of({{1, "plain"}}, 3 * kStepsPerStage, GetParam());
  ASSERT_EQ(expected.size(), 3 * kStepsPerStage);
  const auto losses =
      losses_of({{4, "hybrid-ragged"}, {2, "full-per-parameter"}, {1, "full-ragged"}}, kStepsPerStage, GetParam());
  const auto difference = largest_difference(losses, expected);
  std::printf("%s on 4, 2 and 1 ranks: losses from %.4f to %.4f, the largest difference %.1e\n", GetParam().c_str(),
              expected.front(), expected.back(), difference);
  EXPECT_NE(expected.back(), expected.front());
  EXPECT_LE(difference, 1e-6);
}

INSTANTIATE_TEST_SUITE_P(OwnTrainings, ResumeOwn, ::testing::Values("Lion", "LionAndAdamW", "Lbfgs", "Gan"),
                         [](const auto& info) { return info.param; });

} // namespace
} // namespace tessera::checkpoint::resume_test
