// How a job ends that is told to: by signals to the launcher and to its ranks.
#include <tessera/tests/collectives/rank_jobs.h>

#include <c10/util/StringUtil.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

namespace tessera::testing::termination_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

/// Of whom the signal comes to: the program that started the ranks alone, or its ranks as well.
enum class Signalled { kLauncher, kAll };

ProgramResult run_until_signal(const std::string& how, int ranks, Signalled signalled,
                               std::map<std::string, std::string> environment = {}) {
  environment.emplace("TESSERA_TIMEOUT_SECONDS", kNeverSeconds);
  environment.emplace("TESSERA_GRACE_SECONDS", "600"); // longer than any test runs
  if (signalled == Signalled::kAll) environment.emplace("RANK_PROGRAM_SIGNALS_ALL", "1");
  auto result = run_program({program_folder() + "/rank_program", "ends_by_signal/" + how, "--ranks", std::to_string(ranks)},
                            environment, std::chrono::seconds(120), Start::kForkedAsSession);
  EXPECT_THAT(result.left_behind, IsEmpty()) << result.output;
  return result;
}

constexpr auto kSignalled = {Signalled::kLauncher, Signalled::kAll};

TEST(Termination, RanksThatSaveAndReturnEndWell) {
  for (const auto signalled : kSignalled) {
    for (int ranks = 1; ranks <= 4; ++ranks) {
      const auto result = run_until_signal("save_together", ranks, signalled);
      ASSERT_EQ(result.status, 0) << result.output; // one that hangs is killed after minutes: there are eight
      for (int rank = 0; rank < ranks; ++rank)
        EXPECT_THAT(result.output, HasSubstr(c10::str("rank ", rank, " of ", ranks, " saved")));
    }
  }
}

TEST(Termination, RanksThatItEndsAreItsStatus) {
  for (const auto signalled : kSignalled) {
    for (const std::string how : {"do_nothing_about_it", "exit_as_ended_by_it", "before_all_have_started"}) {
      for (const int ranks : {1, 3}) {
        const auto result = run_until_signal(how, ranks, signalled);
        EXPECT_EQ(result.status, 143) << how << " " << result.output;
        EXPECT_THAT(result.output, Not(HasSubstr("error"))) << how;
      }
    }
  }
}

/// They have agreed to end, because one of them had the signal.
TEST(Termination, RanksThatAllEndWithItsStatusAreItsStatus) {
  const auto result = run_until_signal("exit_as_ended_without_it", 3, Signalled::kLauncher);
  EXPECT_EQ(result.status, 143) << result.output;
  EXPECT_THAT(result.output, Not(HasSubstr("error")));
}

TEST(Termination, RanksThatSaveGoOnWhereOthersHaveEnded) {
  for (const auto signalled : kSignalled) {
    const auto result = run_until_signal("last_does_nothing_about_it", 3, signalled);
    EXPECT_EQ(result.status, 143);
    EXPECT_THAT(result.output, AllOf(HasSubstr("rank 0 of 3 saved"), HasSubstr("rank 1 of 3 saved")));
  }
}

// To whom the signal has come too, and who has no time to act on it.
TEST(Termination, ARankThatFailsForOthersThatItEndedIsNoError) {
  for (int i = 0; i < 5; ++i) {
    const auto result = run_until_signal("last_misses_the_others", 3, Signalled::kAll);
    ASSERT_EQ(result.status, 143) << result.output;
  }
}

TEST(Termination, RanksThatDoNotEndInTimeAreKilledAndNamed) {
  for (const auto signalled : kSignalled) {
    for (const std::string seconds : {"0", "1"}) {
      const auto result = run_until_signal("never_end", 2, signalled, {{"TESSERA_GRACE_SECONDS", seconds}});
      EXPECT_EQ(result.status, 1);
      EXPECT_THAT(result.output,
                  HasSubstr("error: ranks 0, 1 of 2 had not ended " + seconds +
                            " s after SIGTERM, and were killed; TESSERA_GRACE_SECONDS and LaunchOptions::termination_seconds "
                            "allow more time"));
    }
  }
  EXPECT_THAT(run("sums", 2, {{"TESSERA_GRACE_SECONDS", "-1"}}).output,
              HasSubstr("environment variable TESSERA_GRACE_SECONDS=-1 is not a whole number of seconds between 0 and 9999999"));
}

TEST(Termination, LaterOnesReachTheRanksToo) {
  const auto result = run_until_signal("end_at_the_second", 3, Signalled::kLauncher);
  EXPECT_EQ(result.status, 143) << result.output;
  for (int rank = 0; rank < 3; ++rank) EXPECT_THAT(result.output, HasSubstr(c10::str("rank ", rank, " of 3 had a second")));
}

TEST(Termination, ARankThatFailsToSaveIsTheError) {
  for (const auto signalled : kSignalled) {
    const auto result = run_until_signal("last_fails_to_save", 2, signalled);
    EXPECT_EQ(result.status, 1);
    EXPECT_THAT(result.output, AllOf(HasSubstr("error: rank 1 of 2 failed: the disk is full"), HasSubstr("rank 0 of 2 saved")));
  }
}

TEST(Termination, ARankThatFailedBeforeIsTheError) {
  const auto result = run_until_signal("last_has_failed", 3, Signalled::kLauncher);
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("error: rank 2 of 3 failed: no more data"));
}

// What a rank inherits of the program's handler, here and in the next test, depends on how it is executed.
TEST(Termination, AHandlerOfTheProgramIsCalledInEveryProcessAndStays) {
  const auto result =
      run_program({program_folder() + "/rank_program", "launch_with_a_handler"}, {{"TESSERA_GRACE_SECONDS", "600"}});
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_EQ(count_of("handled\n", result.output), 4) << result.output; // the last time after launch
  EXPECT_THAT(result.output, AllOf(HasSubstr("rank 0 of 2 saved"), HasSubstr("rank 1 of 2 saved"),
                                   HasSubstr("the program's handler is in force")));
}

TEST(Termination, AProgramThatIgnoresItGoesOn) {
  const auto result = run_program({program_folder() + "/rank_program", "launch_where_it_is_ignored"});
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_THAT(result.output, AllOf(HasSubstr("rank 0 of 2 saved"), HasSubstr("rank 1 of 2 saved")));
}

} // namespace
} // namespace tessera::testing::termination_test
