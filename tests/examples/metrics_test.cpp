#include <gmock/gmock.h>
#include <gpt/metrics.h>
#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "../support/temporary_folder.h"

namespace gpt::metrics_test {
namespace {

using tessera::testing::TemporaryFolder;

std::vector<nlohmann::json> read(const std::string& path) {
  std::vector<nlohmann::json> records;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) records.push_back(nlohmann::json::parse(line));
  return records;
}

TEST(JsonLog, KeepsEveryDigit) {
  TemporaryFolder folder;
  const auto path = folder.file("new/folder/log.jsonl");
  StepMetrics metrics{
      .step = 3, .loss = 1.0 / 3.0, .learning_rate = 1e-4 / 7, .gradient_norm = 2.0 / 3.0, .tokens_per_second = 12.5};
  JsonLog(path, false).step(metrics);
  const auto records = read(path);
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records[0]["kind"], "step");
  EXPECT_EQ(records[0]["step"], 3);
  EXPECT_EQ(records[0]["loss"].get<double>(), metrics.loss);
  EXPECT_EQ(records[0]["lr"].get<double>(), metrics.learning_rate);
  EXPECT_EQ(records[0]["grad_norm"].get<double>(), metrics.gradient_norm);
}

TEST(JsonLog, TheNormOfAnOverflowIsNull) {
  TemporaryFolder folder;
  const auto path = folder.file("log.jsonl");
  JsonLog(path, false).step({.step = 1, .gradient_norm = std::numeric_limits<double>::infinity()});
  EXPECT_TRUE(read(path).at(0)["grad_norm"].is_null());
}

TEST(JsonLog, AppendsOrStartsAfresh) {
  TemporaryFolder folder;
  const auto path = folder.file("log.jsonl");
  JsonLog(path, false).validation(1, 0.5);
  JsonLog(path, true).validation(2, 0.25);
  EXPECT_EQ(read(path).size(), 2u);
  JsonLog(path, false).validation(3, 0.125);
  ASSERT_EQ(read(path).size(), 1u);
  EXPECT_EQ(read(path)[0]["step"], 3);
}

TEST(JsonLog, NoFileForAnEmptyPath) {
  JsonLog log("", false);
  log.validation(1, 0.5); // goes nowhere
}

TEST(JsonLog, NamesTheFileItCannotWrite) {
  TemporaryFolder folder;
  const auto path = folder.write("file", "") + "/log.jsonl";
  try {
    const JsonLog log(path, false);
    FAIL() << "no error";
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what_without_backtrace(), ::testing::HasSubstr(path));
  }
}

} // namespace
} // namespace gpt::metrics_test
