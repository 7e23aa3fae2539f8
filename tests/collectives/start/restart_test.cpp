// `launch` starts a job that failed again.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <c10/util/StringUtil.h>

#include <string>

#include "../rank_jobs.h"

namespace tessera::testing::restart_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

ProgramResult run_with(const std::string& restarts, const std::string& scenario, int ranks) {
  return run(scenario, ranks, {{"RANK_PROGRAM_RESTARTS", restarts}});
}

TEST(Restart, AJobBeginsAgainUntilItEndsWell) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    const auto result = run_with("3,0", "last_rank_is_killed_in_two_jobs", ranks);
    EXPECT_EQ(result.status, 0) << result.output;
    for (const int number : {1, 2}) {
      EXPECT_THAT(result.output, HasSubstr(c10::str("restart ", number, " with ", ranks, " ranks: rank ", ranks - 1, " of ",
                                                    ranks, " was killed by signal 9 (SIGKILL)")));
    }
    EXPECT_THAT(result.output, Not(HasSubstr("restart 3")));
    EXPECT_EQ(count_of(c10::str("of ", ranks, " done"), result.output), ranks) << result.output;
  }
}

TEST(Restart, TheLastFailureIsThrown) {
  const auto result = run_with("1,0", "last_rank_is_killed_in_two_jobs", 2);
  EXPECT_EQ(result.status, 1);
  EXPECT_EQ(count_of("restart ", result.output), 1) << result.output;
  EXPECT_THAT(result.output, HasSubstr("error: rank 1 of 2 was killed by signal 9 (SIGKILL)"));
}

TEST(Restart, AJobGoesOnWithFewerRanks) {
  const auto result = run_with("9,2", "last_of_more_than_two_ranks_throws", 4);
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_THAT(result.output, HasSubstr("restart 1 with 3 ranks: rank 3 of 4 failed: no device"));
  EXPECT_THAT(result.output, HasSubstr("restart 2 with 2 ranks: rank 2 of 3 failed: no device"));
  EXPECT_EQ(count_of("of 2 done", result.output), 2) << result.output;
}

TEST(Restart, NoJobHasFewerRanksThanAreWanted) {
  const auto result = run_with("2,3", "last_of_more_than_two_ranks_throws", 4);
  EXPECT_EQ(result.status, 1);
  EXPECT_EQ(count_of("with 3 ranks", result.output), 2) << result.output;
  EXPECT_THAT(result.output, HasSubstr("error: rank 2 of 3 failed: no device"));
}

TEST(Restart, NothingBeginsAgainAfterASigterm) {
  for (const std::string how : {"save_together", "do_nothing_about_it", "exit_as_ended_by_it"}) {
    const auto result = run_program({program_folder() + "/rank_program", "ends_by_signal/" + how, "--ranks", "2"},
                                    {{"RANK_PROGRAM_RESTARTS", "3,0"}, {"TESSERA_GRACE_SECONDS", "600"}},
                                    std::chrono::seconds(120), Start::kForkedAsSession);
    EXPECT_EQ(result.status, how == "save_together" ? 0 : 143) << result.output;
    EXPECT_THAT(result.output, Not(HasSubstr("restart")));
  }
}

TEST(Restart, NothingBeginsAgainAfterASigtermBetweenTwoJobs) {
  const auto result =
      run("last_rank_is_killed_in_two_jobs", 2, {{"RANK_PROGRAM_RESTARTS", "3,0"}, {"RANK_PROGRAM_ENDS_BEFORE_RESTART", "1"}});
  EXPECT_EQ(result.status, 1) << result.output;
  EXPECT_EQ(count_of("restart ", result.output), 1) << result.output;
  EXPECT_THAT(result.output, HasSubstr("error: rank 1 of 2 was killed by signal 9 (SIGKILL)"));
}

TEST(Restart, WhatMeansNothingIsAnError) {
  EXPECT_THAT(run_with("-1,0", "sums", 2).output, HasSubstr("launch: max_restarts is -1, but must not be negative"));
  EXPECT_THAT(run_with("1,3", "sums", 2).output, HasSubstr("launch: min_ranks is 3, but must be from 0 to the 2 ranks"));
}

} // namespace
} // namespace tessera::testing::restart_test
