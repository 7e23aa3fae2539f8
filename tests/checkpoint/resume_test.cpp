// Jobs of other sizes and strategies go on with the loss curve of an uninterrupted one.
#include "../support/subprocess.h"
#include "../support/sweep.h"
#include "temporary_folder.h"

namespace tessera::checkpoint {
namespace {

struct Stage {
  int ranks;
  std::string strategy;
};

constexpr int kStepsPerStage = 4;

std::vector<double> losses_of(const std::vector<Stage>& stages, int steps_per_stage) {
  const testing::TemporaryFolder root;
  std::vector<double> losses;
  int last_step = 0;
  for (const auto& [ranks, strategy] : stages) {
    last_step += steps_per_stage;
    const auto result = testing::run_program({testing::program_folder() + "/checkpoint_resume_helper", "--ranks",
                                              std::to_string(ranks), root.path(), strategy, std::to_string(last_step)});
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
  for (const auto& stages : runs) {
    const auto losses = losses_of(stages, kStepsPerStage);
    ASSERT_EQ(losses.size(), expected.size());
    for (size_t step = 0; step < losses.size(); ++step) {
      EXPECT_NEAR(losses[step], expected[step], 1e-5) << "step " << step << ", first on " << stages[0].ranks << " ranks";
      worst = std::max(worst, std::abs(losses[step] - expected[step]));
    }
  }
  std::printf("largest difference of a loss: %.2e\n", worst);
}

} // namespace
} // namespace tessera::checkpoint
