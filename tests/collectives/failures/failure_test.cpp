// Whole jobs that go wrong: each ends with an error that names the cause, in time, and leaves no process behind.
#include <tessera/tests/collectives/rank_jobs.h>
#include <tessera/tests/support/sweep.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera::testing::failure_test {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(Failure, ARankThatThrowsIsNamedWithItsMessage) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    const auto result = run("last_rank_throws", ranks);
    EXPECT_EQ(result.status, 1);
    EXPECT_THAT(result.output,
                HasSubstr("error: rank " + std::to_string(ranks - 1) + " of " + std::to_string(ranks) + " failed: no more data"));
  }
}

TEST(Failure, ARankMayEndAsSoonAsItHasAGroup) {
  for (const std::string hosts : {"0000", "0011"}) {
    for (int again = 0; again < 2; ++again) {
      const auto result = run("makes_a_group_and_ends", 4, {{"RANK_PROGRAM_HOSTS", hosts}, {"GLOO_SOCKET_IFNAME", "lo"}});
      EXPECT_EQ(result.status, 0) << result.output;
    }
  }
}

TEST(Failure, AKilledRankIsNamedWithItsSignal) {
  for (int ranks = 2; ranks <= 4; ++ranks) {
    const auto result = run("last_rank_is_killed", ranks);
    EXPECT_EQ(result.status, 1);
    EXPECT_THAT(result.output, HasSubstr("error: rank " + std::to_string(ranks - 1) + " of " + std::to_string(ranks) +
                                         " was killed by signal 9 (SIGKILL)"));
  }
}

TEST(Failure, ARankKilledInTheMiddleOfAPayload) {
  for (int ranks = 2; ranks <= 3; ++ranks) {
    const auto result = run("killed_in_the_middle_of_an_all_gather", ranks);
    EXPECT_EQ(result.status, 1);
    const auto last = std::to_string(ranks - 1);
    EXPECT_THAT(result.output, HasSubstr("error: rank " + last + " of " + std::to_string(ranks) + " was killed by signal 9"));
    // The survivors noticed by themselves.
    EXPECT_THAT(result.output, HasSubstr("rank 0 then failed: all_gather 'big' of group default"));
    EXPECT_THAT(result.output, HasSubstr("lost the connection to rank " + last + ", which has exited or failed"));
  }
}

TEST(Failure, ARankThatExitsWithAStatus) {
  const auto result = run("last_rank_exits_quietly", 3);
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("error: rank 2 of 3 exited with status 3"));
}

TEST(Failure, ARankThatNeverCallsIsNamedAtTheTimeout) {
  const auto result = run("last_rank_never_calls", 3, {{"TESSERA_TIMEOUT_SECONDS", "1"}});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("barrier 'the last rank does not come' of group default [0, 1, 2] on rank "));
  EXPECT_THAT(result.output, HasSubstr("timed out after 1000 ms, waiting for the call of rank 2"));
  EXPECT_THAT(result.output, HasSubstr("ended by launch: rank 2"));
}

TEST(Failure, ARankThatNeverJoinsIsNamedAtTheTimeout) {
  const auto result = run("rank_1_never_joins", 3, {{"TESSERA_TIMEOUT_SECONDS", "1"}});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("timed out after 1000 ms; of 3 ranks these did not come: 1"));
}

TEST(Failure, ARankThatOrdersAGroupDifferentlyIsNamedAtTheTimeout) {
  const auto result = run("orders_of_ranks_differ", 3, {{"TESSERA_TIMEOUT_SECONDS", "2"}});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("[0, 1, 2]: rank 1 did not connect a group of these ranks in this order"));
}

TEST(Failure, StrangersOnEveryPortEndNoJob) {
  const auto result = run("strangers_on_every_port", 2);
  EXPECT_EQ(result.status, 0) << result.output;
  for (int rank = 0; rank < 2; ++rank)
    EXPECT_THAT(result.output, ContainsRegex("rank " + std::to_string(rank) + " met [0-9]{4,} strangers"));
}

TEST(Failure, DifferentOperationsAreAnErrorOnEveryRank) {
  const auto result = run("different_operations", 3);
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("the ranks of the group called different collectives:"));
  EXPECT_THAT(result.output, HasSubstr("rank 0: broadcast 'weights' (32 bytes of Float, root 0, call 0)"));
  EXPECT_THAT(result.output, HasSubstr("rank 1: all_reduce 'loss' (32 bytes of Float, sum, call 0)"));
  EXPECT_THAT(result.output, HasSubstr("rank 2: all_reduce 'loss' (32 bytes of Float, sum, call 0)"));
}

// The survivors come one after another, when the one before has failed and may have exited.
TEST(Failure, ARankThatEndsIsNamedByAllOthersAndByLaunch) {
  const std::map<std::string, std::string> endings{{"kill", "was killed by signal 9 (SIGKILL)"},
                                                   {"exit", "exited with status 0 before the others finished"},
                                                   {"_exit", "exited with status 0 before the others finished"},
                                                   {"throw", "failed: boom"}};
  const std::map<std::string, std::string> notices{
      {"join", "init_process_group on rank R: these ranks have ended before they called it: 1"},
      {"first_group", "rank R cannot connect group first_group [0, 1, 2, 3]: it needs rank 1, which has exited or failed"},
      {"second_group", "rank R cannot connect group second_group [0, 1, 2, 3]: it needs rank 1, which has exited or failed"},
      {"collective",
       "barrier 'late' of group default [0, 1, 2, 3] on rank R: lost the connection to rank 1, which has exited or"}};
  std::vector<std::pair<std::string, std::string>> cases;
  for (const auto& [how, ending] : endings) {
    for (const auto& [where, notice] : notices) {
      if (where == "collective" || how == "exit" || how == "kill") cases.emplace_back(how, where); // the others are as these two
    }
  }
  for (const auto& [how, where] : sweep(cases, 5)) {
    SCOPED_TRACE(how + " before " + where);
    const auto result = run("dies/" + how + "/" + where, 4);
    EXPECT_EQ(result.status, 1);
    EXPECT_THAT(result.output, HasSubstr("error: rank 1 of 4 " + endings.at(how)));
    EXPECT_THAT(result.output, Not(HasSubstr("has exited or failed: rank 1 has exited or failed"))) << "the same twice";
    auto notice = notices.at(where);
    const auto place = notice.find('R');
    for (const auto* survivor : {"0", "2", "3"}) EXPECT_THAT(result.output, HasSubstr(notice.replace(place, 1, survivor)));
  }
}

// On another host nobody sees its process end: its connections in the group before say so.
TEST(Failure, OverHostsARankThatEndsWhileAGroupIsMadeIsNamedByAll) {
  for (const std::string hosts : {"0122", "0011"}) {
    SCOPED_TRACE(hosts);
    const auto result = run("dies/kill/second_group", 4, on_hosts(hosts));
    for (const std::string survivor : {"0", "2", "3"})
      EXPECT_THAT(result.output, HasSubstr("rank " + survivor +
                                           " cannot connect group second_group [0, 1, 2, 3]: it needs rank 1, "
                                           "which has exited or failed"));
  }
}

TEST(Failure, ARankIsNoticedThoughAnotherProcessOutlivesIt) {
  for (const std::string left : {"last_rank_leaves_a_program", "last_rank_leaves_a_fork"}) {
    const auto result = run(left, 2);
    EXPECT_THAT(result.output, AllOf(HasSubstr("error: rank 1 of 2 was killed by signal 9"),
                                     HasSubstr("noticed while the process runs"), HasSubstr("lost the connection to rank 1")));
  }
}

TEST(Failure, ARankThatTimedOutIsNotBlamed) {
  const auto result = run("last_rank_never_calls_and_others_follow", 3, {{"TESSERA_TIMEOUT_SECONDS", "5"}});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(
      result.output,
      AllOf(HasSubstr("barrier 'late' of group default [0, 1, 2] on rank 0: timed out after 5000 ms, waiting for the call of "
                      "ranks 1, 2"),
            Not(HasSubstr("rank 0, which has exited or failed"))));
}

// The time of the one that waits in front is up first.
TEST(Failure, ARankThatWaitsForAnotherIsNotBlamedBeforeItsTimeIsUp) {
  const std::vector<std::string> all{"in_a_collective", "for_a_group", "for_the_end_of_a_meeting"};
  for (const auto& where : sweep(all, 1)) {
    SCOPED_TRACE(where);
    const auto result = run("rank_1_waits_later_" + where, 3, {{"TESSERA_TIMEOUT_SECONDS", "4"}});
    EXPECT_EQ(result.status, 1);
    EXPECT_THAT(result.output, AllOf(HasSubstr("barrier 'front' of group default [0, 1] on rank 0: timed out after 4000 ms"),
                                     HasSubstr(" (rank 1 has waited for rank 2 in vain)")));
  }
}

TEST(Failure, AWaitThatIsPolledIsTakenBackWhenItIsOver) {
  const auto result = run("rank_0_polls_what_comes_late", 2, {{"TESSERA_TIMEOUT_SECONDS", "4"}});
  EXPECT_EQ(result.status, 0) << result.output;
}

TEST(Failure, ARankThatEndsWhileItWaitsIsNamed) {
  const auto result = run("rank_1_is_killed_while_it_waits", 3, {{"TESSERA_TIMEOUT_SECONDS", "20"}});
  EXPECT_THAT(result.output, HasSubstr("barrier 'front' of group default [0, 1] on rank 0: lost the connection to rank 1, which "
                                       "has exited or failed"));
}

TEST(Failure, ACollectiveBesideOneThatTimedOutNamesThatAndNoOtherRank) {
  const auto result = run("last_rank_never_calls_and_rank_1_calls_one_of_two", 3, {{"TESSERA_TIMEOUT_SECONDS", "2"}});
  EXPECT_EQ(result.status, 1);
  const std::string first =
      "all_reduce 'first' of group default [0, 1, 2] on rank 0: timed out after 2000 ms, waiting for the call of rank 2: every "
      "rank of "
      "the group must call it\n";
  EXPECT_THAT(result.output, AllOf(HasSubstr(first), HasSubstr("all_reduce 'second' of group default [0, 1, 2] on rank 0: the "
                                                               "group's connections were closed after an earlier failure: " +
                                                               first)));
}

// Each rank is on a host of its own. The one that misses the first can say so, but has no time left to record it.
TEST(Failure, ARankThatEndsIsNamedThoughTheOneThatMissedItEndsToo) {
  const auto result = run("last_rank_is_killed_and_then_rank_0", 4, on_hosts("0123"));
  EXPECT_EQ(result.status, 1);
  for (const std::string survivor : {"1", "2"})
    EXPECT_THAT(result.output,
                HasSubstr("rank " + survivor + " then failed: all_reduce 'sums' of group default [0, 1, 2, 3] on rank " +
                          survivor + ": lost the connection to rank 3, which has exited or failed"));
}

// Each rank waits for some of the others alone, and these in turn for the last.
TEST(Failure, OverHostsARankThatEndsOrStopsInTheMiddleIsNamedByAll) {
  if (std::getenv("TESSERA_TRANSPORT") != nullptr) GTEST_SKIP() << "over gloo alone every rank waits for every other";
  for (const std::string hosts : {"0011", "0101"}) {
    const auto killed = run("killed_in_the_middle_of_an_all_gather", 4, on_hosts(hosts));
    const auto stopped = run("stopped_in_the_middle_of_an_all_gather", 4, on_hosts(hosts, "3"));
    for (const std::string survivor : {"0", "1", "2"}) {
      const auto call = "all_gather 'big' of group default[^\n]* on rank " + survivor + ": ";
      EXPECT_THAT(killed.output, ContainsRegex(call + "lost the connection to [^\n]*rank 3, which has exited or failed"));
      EXPECT_THAT(stopped.output, ContainsRegex(call + "(timed out|lost the connection)[^\n]* (of|for) rank 3"));
    }
  }
}

/// Where ranks compare what they call they learn why. Where they do not, it leaves, and they need not wait for their timeout.
TEST(Failure, ARankThatGivesUpIsNoticedByAll) {
  for (const std::string hosts : {"0000", "0011"}) {
    for (const std::string compares : {"0", "1"}) {
      auto environment = on_hosts(hosts);
      environment["TESSERA_CHECK_COLLECTIVES"] = compares;
      const auto result = run("last_rank_gives_up", 4, environment);
      EXPECT_EQ(result.status, 1);
      for (const std::string rank : {"0", "1", "2"})
        EXPECT_THAT(result.output,
                    ContainsRegex("all_gather 'big' of group default[^\n]* on rank " + rank +
                                  ": (the ranks of the group called different|lost the connection to [^\n]*rank 3)"))
            << hosts << ", compares: " << compares;
    }
  }
}

TEST(Failure, ACollectiveThatNobodyWaitsForRecordsNobody) {
  const auto result = run("nobody_waits_for_the_last_rank", 2);
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_THAT(result.output, ContainsRegex("not recorded when it had failed\n"
                                           "all_reduce 'polled' of group default \\[0, 1\\] on rank 0: lost the connection to "
                                           "rank 1, which has exited or failed.*\nrecorded when it was waited for"));
}

TEST(Failure, RanksMayEndAtDifferentTimes) {
  std::vector<std::pair<std::string, int>> cases;
  for (const auto* how : {"return", "destroy", "exit", "_exit"}) {
    for (int ranks = 2; ranks <= 4; ++ranks) cases.emplace_back(how, ranks);
  }
  for (const auto& [how, ranks] : sweep(cases, 4)) {
    const auto result = run("ranks_" + how + "_one_after_another", ranks);
    EXPECT_EQ(result.status, 0) << result.output;
    for (int rank = 0; rank < ranks; ++rank)
      EXPECT_THAT(result.output, HasSubstr("rank " + std::to_string(rank) + " of " + std::to_string(ranks) + " done"));
  }
}

TEST(Failure, ARankThatIsStoppedAtTheEndIsAnErrorAtTheTimeout) {
  const auto result = run("last_rank_stops", 3, {{"TESSERA_TIMEOUT_SECONDS", "2"}});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("error: rank 2 of 3 is stopped by signal 19 (SIGSTOP), for 2 s"));
}

/// On one host, and on two with two ranks each, whose groups have a thread that a child has not.
const std::vector<std::pair<int, std::map<std::string, std::string>>> kForkedJobs{{2, {}}, {3, {}}, {4, on_hosts("0011")}};

TEST(Failure, AForkedChildThatUsesAGroupGetsAnErrorAndTheRanksGoOn) {
  for (const auto& [ranks, environment] : kForkedJobs) {
    const auto result = run("forked_child_uses_the_group", ranks, environment);
    EXPECT_EQ(result.status, 0) << result.output;
    for (int rank = 0; rank < ranks; ++rank)
      EXPECT_THAT(result.output,
                  AllOf(ContainsRegex("child: barrier 'in the child' of group default .* on rank " + std::to_string(rank) +
                                      ": this process was forked from a rank and has no part in its groups"),
                        HasSubstr("child: a collective that was started before a fork: this process was forked from a rank"),
                        HasSubstr("child: no process group: call tessera::init_process_group() first"),
                        HasSubstr("child: communicator 'new': this process was forked from rank "),
                        HasSubstr("rank " + std::to_string(rank) + " of " + std::to_string(ranks) + " done")));
  }
}

TEST(Failure, AForkedChildMayDropAGroupThatItsParentHasDestroyed) {
  for (const auto& [ranks, environment] : kForkedJobs) {
    const auto result = run("forked_child_drops_a_destroyed_group", ranks, environment);
    EXPECT_EQ(result.status, 0) << result.output;
    for (int rank = 0; rank < ranks; ++rank)
      EXPECT_THAT(result.output, HasSubstr("rank " + std::to_string(rank) + " of " + std::to_string(ranks) + " done"));
  }
}

} // namespace
} // namespace tessera::testing::failure_test
