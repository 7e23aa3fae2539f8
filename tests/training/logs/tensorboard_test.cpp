// TensorBoard's own reader reads what a log writes.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include <tessera/training/training_log.h>

#include <tessera/tests/support/subprocess.h>
#include <tessera/tests/support/temporary_folder.h>

namespace tessera::testing::tensorboard_test {
namespace {

constexpr int kNotInstalled = 77;

using Series = std::vector<std::pair<int64_t, double>>;

class TensorBoard : public ::testing::Test {
 protected:
  /// What the reader finds, by tags.
  std::map<std::string, Series> read() {
    const auto result =
        run_program({TESSERA_PYTHON, TESSERA_EVENTS_SCRIPT, folder_.path().string()}, {}, std::chrono::seconds(120));
    if (result.status == kNotInstalled) {
      is_installed_ = false;
      return {};
    }
    EXPECT_EQ(result.status, 0) << result.output;
    std::map<std::string, Series> found;
    const auto line = result.output.substr(result.output.rfind('\n', result.output.size() - 2) + 1);
    const auto json = nlohmann::json::parse(line);
    for (const auto& [tag, events] : json.items()) {
      for (const auto& event : events) found[tag].emplace_back(event[0].get<int64_t>(), std::stod(event[1].get<std::string>()));
    }
    return found;
  }

  LogOptions options() const { return {.tensorboard = folder_.path().string()}; }

  TemporaryFolder folder_;
  bool is_installed_ = true;
};

TEST_F(TensorBoard, ReadsTagsStepsAndNumbers) {
  const std::vector<double> losses{4.5, 1.0 / 3, -1e30, std::numeric_limits<double>::infinity(), std::nan("")};
  {
    TrainingLog log(options(), 0);
    for (int64_t i = 0; i < std::ssize(losses); ++i) {
      log.write({"step", i * 1000000007, {{"Train/Samples/train_loss", losses[static_cast<size_t>(i)]}, {"größe", 1}}, {}});
    }
    log.write({"stop", 9, {}, {{"why", "the end"}}}); // nothing to draw
  }
  const auto found = read();
  if (!is_installed_) GTEST_SKIP() << "TensorBoard is not installed (scripts/setup --references)";
  ASSERT_EQ(found.size(), 2U);
  const auto& series = found.at("Train/Samples/train_loss");
  ASSERT_EQ(series.size(), losses.size());
  for (size_t i = 0; i < losses.size(); ++i) {
    EXPECT_EQ(series[i].first, static_cast<int64_t>(i) * 1000000007);
    const auto expected = static_cast<float>(losses[i]);
    EXPECT_TRUE(static_cast<float>(series[i].second) == expected || (std::isnan(expected) && std::isnan(series[i].second)));
  }
  EXPECT_EQ(found.at("größe").size(), losses.size());
}

TEST_F(TensorBoard, SeesOneCurveAfterResumes) {
  {
    TrainingLog log(options(), 0);
    for (int64_t step = 1; step <= 10; ++step) log.write({"step", step, {{"loss", 1}}, {}});
  }
  {
    TrainingLog log(options(), 6);
    for (int64_t step = 7; step <= 12; ++step) log.write({"step", step, {{"loss", 2}}, {}});
  }
  {
    TrainingLog log(options(), 11);
    log.write({"step", 12, {{"loss", 3}}, {}});
  }
  const auto found = read();
  if (!is_installed_) GTEST_SKIP() << "TensorBoard is not installed (scripts/setup --references)";
  Series expected;
  for (int64_t step = 1; step <= 12; ++step) expected.emplace_back(step, step <= 6 ? 1 : step <= 11 ? 2 : 3);
  EXPECT_EQ(found.at("loss"), expected);
}

} // namespace
} // namespace tessera::testing::tensorboard_test
