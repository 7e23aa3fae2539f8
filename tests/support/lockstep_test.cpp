#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "matchers.h"
#include "subprocess.h"

namespace tessera::testing::lockstep_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

ProgramResult run(const std::string& filter) {
  auto result = run_program({program_folder() + "/lockstep_program", "--ranks", "3", "--gtest_filter=" + filter}, {},
                            std::chrono::seconds(120), Start::kForked);
  EXPECT_THAT(result.left_behind, IsEmpty());
  EXPECT_FALSE(result.timed_out) << result.output;
  return result;
}

TEST(Lockstep, PassingTestsAreReportedOnce) {
  const auto result = run("Passes.*");
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_THAT(result.output, HasSubstr("[  PASSED  ] 1 test."));
  EXPECT_EQ(result.output.find("Passes.AfterAll"), result.output.find("[ RUN      ] Passes.AfterAll") + 13);
}

TEST(Lockstep, EveryRanksFailureCarriesItsRank) {
  const auto result = run("Fails.ExpectationOnEveryRank:Passes.*");
  EXPECT_EQ(result.status, 1);
  for (int rank = 0; rank < 3; ++rank)
    EXPECT_THAT(result.output, HasSubstr("[rank " + std::to_string(rank) + "] Expected equality of these values:"));
  EXPECT_THAT(result.output, HasSubstr("[       OK ] Passes.AfterAll")); // the run went on
}

TEST(Lockstep, AFailedExpectationOnOneRankFailsTheRunAndTheRunGoesOn) {
  const auto result = run("Fails.ExpectationOnRank1:Passes.*");
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, AllOf(HasSubstr("[rank 1] "), HasSubstr("rank one expects more"), Not(HasSubstr("[rank 0]"))));
  EXPECT_THAT(result.output, HasSubstr("rank 1 of 3 exited with status 1"));
  EXPECT_THAT(result.output, HasSubstr("[       OK ] Passes.AfterAll"));
}

TEST(Lockstep, AnAssertionThatLeavesTheOthersInACollectiveEndsTheRun) {
  const auto result = run("Fails.AssertionOnRank1BeforeABarrier:Passes.*");
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("rank one leaves"));
  EXPECT_THAT(result.output, HasSubstr("[rank 1] Fails.AssertionOnRank1BeforeABarrier: ranks 0, 2 did not finish the test "
                                       "in 10000 ms"));
  EXPECT_THAT(result.output, HasSubstr("rank 1 of 3 exited with status 1"));
}

TEST(Lockstep, AnExceptionIsReportedWithItsRank) {
  const auto result = run("Fails.ExceptionOnRank1:Passes.*");
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, AllOf(HasSubstr("[rank 1] "), HasSubstr("rank one throws")));
}

TEST(Matchers, SayWhereTensorsDiffer) {
  EXPECT_TRUE(tensors_close(torch::tensor({1.0, std::nan("")}), torch::tensor({1.0 + 1e-7, std::nan("")})));
  EXPECT_TRUE(tensors_equal(torch::empty({0}), torch::empty({0})));
  EXPECT_TRUE(tensors_equal(at::Tensor(), at::Tensor()));
  EXPECT_FALSE(tensors_equal(at::Tensor(), torch::ones({1})));
  EXPECT_FALSE(tensors_equal(torch::ones({2}), torch::ones({1, 2})));
  EXPECT_FALSE(tensors_equal(torch::ones({2}), torch::ones({2}, torch::kDouble)));
  const auto difference = tensors_close(torch::tensor({1.0, 2.0, 3.0}), torch::tensor({1.0, 2.5, 3.0}));
  EXPECT_FALSE(difference);
  EXPECT_THAT(difference.message(), HasSubstr("differ most at flat index 1: 2, expected 2.5"));
}

TEST(Matchers, LookIntoErrors) {
  EXPECT_TRUE(throws_with_message([] { TORCH_CHECK(false, "the cause"); }, "the cause"));
  EXPECT_FALSE(throws_with_message([] { TORCH_CHECK(false, "another cause"); }, "the cause"));
  EXPECT_FALSE(throws_with_message([] {}, "the cause"));
}

TEST(Subprocess, AProcessLeftBehindIsFoundAndEnded) {
  const auto result = run_program({"/bin/sh", "-c", "sleep 1000 > /dev/null 2>&1 & echo started"});
  EXPECT_EQ(result.status, 0);
  EXPECT_EQ(result.output, "started\n");
  EXPECT_EQ(result.left_behind.size(), 1u);
}

} // namespace
} // namespace tessera::testing::lockstep_test
