// Whole jobs that go wrong: each ends with an error that names the cause, in time, and leaves no process behind.
#include "../support/subprocess.h"
#include "../support/sweep.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>
#include <algorithm>
#include <thread>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

const std::pair<const std::string, std::string> kOverGloo{"TESSERA_TRANSPORT", "gloo"};

constexpr std::chrono::seconds kLongTimeout(60); // TESSERA_TIMEOUT_SECONDS of the jobs: no test may get near it

/// As if the ranks were on hosts with these numbers.
std::map<std::string, std::string> on_hosts(const std::string& numbers, const std::string& timeout = "60") {
  return {{"RANK_PROGRAM_HOSTS", numbers}, {"GLOO_SOCKET_IFNAME", "lo"}, {"TESSERA_TIMEOUT_SECONDS", timeout}};
}

ProgramResult run(const std::string& scenario, int ranks, std::map<std::string, std::string> environment = {}) {
  environment.emplace("TESSERA_TIMEOUT_SECONDS", std::to_string(kLongTimeout.count()));
  auto result = run_program({program_folder() + "/rank_program", scenario, "--ranks", std::to_string(ranks)}, environment,
                            std::chrono::seconds(120));
  EXPECT_THAT(result.left_behind, IsEmpty()) << result.output;
  EXPECT_LT(result.duration, kLongTimeout / 2) << result.output;
  return result;
}

TEST(Launch, EveryRankRunsTheWorker) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    const auto result = run("sums", ranks);
    EXPECT_EQ(result.status, 0) << result.output;
    for (int rank = 0; rank < ranks; ++rank)
      EXPECT_THAT(result.output, HasSubstr("rank " + std::to_string(rank) + " of " + std::to_string(ranks) + " done"));
  }
}

TEST(Launch, RanksShareTheCoresWhereOmpNumThreadsIsUnset) {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  for (int ranks = 2; ranks <= 4; ++ranks) {
    const auto result = run_program({"/usr/bin/env", "-u", "OMP_NUM_THREADS", program_folder() + "/rank_program", "threads",
                                     "--ranks", std::to_string(ranks)});
    EXPECT_EQ(result.status, 0) << result.output;
    const std::string threads = " has OMP_NUM_THREADS=" + std::to_string(std::max(1, cores / ranks)) + "\n";
    for (int rank = 0; rank < ranks; ++rank) EXPECT_THAT(result.output, HasSubstr("rank " + std::to_string(rank) + threads));
  }
  EXPECT_THAT(run("threads", 2, {{"OMP_NUM_THREADS", "3"}}).output, HasSubstr("rank 1 has OMP_NUM_THREADS=3"));
}

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

TEST(Failure, WithoutSignaturesDifferentSizesAreATimeoutOverGloo) {
  const auto result =
      run("different_sizes", 2, {{"TESSERA_TIMEOUT_SECONDS", "1"}, {"TESSERA_CHECK_COLLECTIVES", "0"}, kOverGloo});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("timed out after 1000 ms, waiting for the "));
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

TEST(Failure, ARankThatEndsWhileItWaitsIsNamed) {
  const auto result = run("rank_1_is_killed_while_it_waits", 3, {{"TESSERA_TIMEOUT_SECONDS", "4"}});
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

TEST(Failure, DescriptorsThatDoNotSufficeAreAnErrorBeforeAGroupIsMade) {
  const auto raised = run("few_descriptors", 3, {kOverGloo});
  EXPECT_EQ(raised.status, 0) << raised.output;
  EXPECT_THAT(raised.output, HasSubstr("rank 2 of 3 done"));
  const auto result = run("too_few_descriptors", 3, {kOverGloo});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, Not(HasSubstr("taken for the fault of another rank")));
  EXPECT_THAT(result.output,
              ContainsRegex("rank 2 of 3 failed: rank 2 cannot connect group more \\[0, 1, 2\\]: this process needs 7 "
                            "more file descriptors for connections and 16 to spare; it has [0-9]+ open, "
                            "of at most [0-9]+: close some, or raise the limit \\(ulimit -n\\)"));
  for (const std::string other : {"0", "1"}) // who would wait for it until the timeout
    EXPECT_THAT(result.output,
                HasSubstr("rank " + other + " cannot connect group more [0, 1, 2]: rank 2 failed: this process needs"));
}

int count_of(const std::string& part, const std::string& text) {
  int count = 0;
  for (auto found = text.find(part); found != std::string::npos; found = text.find(part, found + 1)) ++count;
  return count;
}

TEST(Transport, RanksThatCannotShareMemoryUseGlooWithOneWarning) {
  const std::string reason = "a file may have 1048576 bytes here (ulimit -f), needed are ";
  const auto result = run("small_files", 3, {{"RANK_PROGRAM_SMALL_FILES", "0"}, {"TESSERA_TRANSPORT", "automatic"}});
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_EQ(
      count_of("the ranks of group default cannot share memory and exchange data over gloo, which is slower: rank 0: " + reason,
               result.output),
      1)
      << result.output;
  EXPECT_EQ(count_of(reason, result.output), 1) << result.output;
  EXPECT_THAT(result.output, HasSubstr("rank 2 of 3 done"));
  const auto strict = run("small_files", 3, {{"RANK_PROGRAM_SMALL_FILES", "0"}, {"TESSERA_TRANSPORT", "shared_memory"}});
  EXPECT_EQ(strict.status, 1);
  EXPECT_THAT(strict.output,
              HasSubstr("rank 1 cannot connect group default [0, 1, 2]: the ranks cannot share memory: rank 0: " + reason));
}

TEST(Transport, AnInterfaceThatIsNotThereIsAnErrorThatNamesTheVariable) {
  const auto result = run("sums", 2, {{"TESSERA_TRANSPORT", "gloo"}, {"GLOO_SOCKET_IFNAME", "nonsense0"}});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("environment variable GLOO_SOCKET_IFNAME=nonsense0: "));
}

TEST(Transport, RanksThatHaveNoArenasShareMemoryWithoutThem) {
  const auto result = run("small_files", 3, {{"RANK_PROGRAM_SMALL_FILES", "12"}, {"TESSERA_TRANSPORT", "shared_memory"}});
  EXPECT_EQ(result.status, 0) << result.output;
}

TEST(Transport, WhatIsNotTheSameOnAllRanksIsAnError) {
  const auto result = run("sums", 3, {{"TESSERA_TRANSPORT", "gloo"}, {"RANK_PROGRAM_TRANSPORT_2", "shared_memory"}});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output,
              HasSubstr("init_process_group: the transport (TESSERA_TRANSPORT, ProcessGroupOptions) is gloo on rank 0 "
                        "and shared_memory on rank 2"));
  EXPECT_THAT(run("sums", 2, {{"TESSERA_TRANSPORT", "tcp"}}).output,
              HasSubstr("environment variable TESSERA_TRANSPORT=tcp must be automatic, shared_memory or gloo"));
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

TEST(ProcessGroup, RanksJoinJobAfterJobWhoseStoreRank0Hosts) {
  for (int ranks = 2; ranks <= 4; ++ranks) {
    const auto result = run("joins_job_after_job", ranks);
    EXPECT_EQ(result.status, 0) << result.output;
  }
}

TEST(Failure, ARankThatEndsAfterItHasSentItsPartIsNotMissedOnAStarvedMachine) {
  const auto result = run("last_rank_ends_and_the_reader_is_held", 2, {{"TESSERA_CHECK_COLLECTIVES", "0"}, kOverGloo});
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_THAT(result.output, HasSubstr("rank 0 of 2 done"));
}

TEST(Failure, LaunchRefusesAProcessGroupThatIsUp) {
  const auto result = run_program({program_folder() + "/rank_program", "launch_after_init"});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("launch: a process group is already up in this process"));
}

TEST(Failure, LaunchRefusesASecondLaunchAndAnotherNumberOfRanks) {
  const auto twice = run_program({program_folder() + "/rank_program", "launches_twice"});
  EXPECT_EQ(twice.status, 1);
  EXPECT_THAT(twice.output, HasSubstr("launch: called again in a rank; a program launches once"));
  const auto another = run_program({program_folder() + "/rank_program", "launches_another_number"});
  EXPECT_EQ(another.status, 1);
  EXPECT_THAT(another.output, HasSubstr("launch: asks for 3 ranks in one of 2"));
}

TEST(Failure, LaunchRefusesAnotherLaunchersRank) {
  const auto result = run_program({program_folder() + "/rank_program", "sums", "--ranks", "2"}, {{"RANK", "0"}});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("already a rank of another launcher's job (RANK=0)"));
}

TEST(Failure, LaunchRefusesAProgramThatAnotherLauncherStartedSeveralTimes) {
  for (const std::string name : {"OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"}) {
    const auto result = run_program({program_folder() + "/rank_program", "sums", "--ranks", "2"}, {{name, "3"}});
    EXPECT_EQ(result.status, 1);
    EXPECT_THAT(result.output, HasSubstr("launch: another launcher started this program 3 times (" + name + "=3)"));
  }
}

TEST(Failure, LaunchRefusesTheVariablesOfARankThatItIsNot) {
  for (const auto& stale : {std::map<std::string, std::string>{{"TESSERA_LAUNCH_PIPE", "5"}},
                            {{"TESSERA_LAUNCH_PIPE", "5"}, {"TESSERA_LAUNCH_PARENT", "1"}}}) {
    const auto result = run_program({program_folder() + "/rank_program", "sums", "--ranks", "2"}, stale);
    EXPECT_EQ(result.status, 1);
    EXPECT_THAT(result.output,
                HasSubstr("launch: the environment describes a rank that process " + std::string(stale.size() > 1 ? "1" : "?") +
                          " has started (TESSERA_LAUNCH_PIPE is set), but that is not this process's parent"));
  }
}

TEST(Failure, BadRankCounts) {
  EXPECT_THAT(run_program({program_folder() + "/rank_program", "sums", "--ranks", "1025"}).output,
              HasSubstr("launch: the number of ranks must be 1 to 1024, not 1025"));
  for (const std::string bad : {"0", "-1", "two", "2x", "", "99999999999"}) {
    const auto result = run_program({program_folder() + "/rank_program", "sums", "--ranks", bad});
    EXPECT_EQ(result.status, 1);
    EXPECT_THAT(result.output, HasSubstr("--ranks " + bad + " is not a positive number"));
  }
  EXPECT_THAT(run_program({program_folder() + "/rank_program", "sums", "--ranks"}).output, HasSubstr("--ranks needs a number"));
}

TEST(Failure, TheRanksDieWithTheProgram) {
  const auto result = run_program({program_folder() + "/rank_program", "last_rank_never_calls", "--ranks", "2"}, {},
                                  std::chrono::seconds(2)); // which kills the parent
  EXPECT_EQ(result.status, 137);
  EXPECT_THAT(result.left_behind, IsEmpty());
}

// Starts ranks by hand with the variables that other launchers set; rank 0 opens the store. The last one's status, if not 0.
ProgramResult run_by_hand(const std::string& scenario, int ranks, const std::string& common, const std::string& rank_variable,
                          const std::string& local_rank_variable) {
  std::string script;
  for (int rank = 0; rank < ranks; ++rank)
    script += c10::str(common, " ", rank_variable, "=", rank, " ", local_rank_variable, "=", rank, " ", program_folder(),
                       "/rank_program ", scenario, rank + 1 < ranks ? " & " : " && wait $!");
  return run_program({"/bin/sh", "-c", script}, {{"TESSERA_TIMEOUT_SECONDS", std::to_string(kLongTimeout.count())}},
                     std::chrono::seconds(120));
}

// A port below those that the system gives to whoever asks for any: nobody takes it between here and rank 0's store.
std::string free_port() {
  static int calls = 0;
  return std::to_string(20000 + (4 * getpid() + calls++) % 12000);
}

// How a rank of two ends that looks for the store at this port.
std::string error_of_rank(const std::string& rank, const std::string& port) {
  const auto result = run_program({program_folder() + "/rank_program", "sums"}, {{"RANK", rank},
                                                                                 {"WORLD_SIZE", "2"},
                                                                                 {"MASTER_ADDR", "127.0.0.1"},
                                                                                 {"MASTER_PORT", port},
                                                                                 {"TESSERA_TIMEOUT_SECONDS", "1"}});
  EXPECT_EQ(result.status, 1);
  // c10d logs before it, and behind it where its own attempt is given up.
  const auto error = result.output.substr(std::min(result.output.rfind("error: "), result.output.size()));
  return error.substr(0, error.find("\n["));
}

TEST(Store, WhatAcceptsTheConnectionAndNeverAnswersIsAnErrorAtTheTimeout) {
  const int listening = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  ASSERT_EQ(bind(listening, reinterpret_cast<sockaddr*>(&address), length), 0);
  ASSERT_EQ(listen(listening, 4), 0);
  ASSERT_EQ(getsockname(listening, reinterpret_cast<sockaddr*>(&address), &length), 0);
  EXPECT_THAT(error_of_rank("1", std::to_string(ntohs(address.sin_port))),
              AllOf(HasSubstr("error: init_process_group on rank 1 of 2: cannot reach the store at 127.0.0.1:"),
                    HasSubstr("nothing answers there, or what answers is no store")));
  close(listening);
}

TEST(Store, OneThatCannotBeOpenedOrReachedIsAnErrorInALine) {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  const c10d::TCPStore somebody("127.0.0.1", options);
  EXPECT_THAT(error_of_rank("0", std::to_string(somebody.getPort())),
              AllOf(HasSubstr("error: init_process_group on rank 0 of 2: cannot open the store at 127.0.0.1:"),
                    HasSubstr("EADDRINUSE"), Not(HasSubstr("frame #"))));
  EXPECT_THAT(error_of_rank("1", free_port()),
              AllOf(HasSubstr("error: init_process_group on rank 1 of 2: cannot reach the store at 127.0.0.1:"),
                    Not(HasSubstr("frame #"))));
}

ProgramResult run_under_mpirun(const std::string& scenario, int ranks) {
  return run_by_hand(
      scenario, ranks,
      c10::str("OMPI_COMM_WORLD_SIZE=", ranks, " OMPI_COMM_WORLD_LOCAL_SIZE=", ranks, " MASTER_PORT=", free_port()),
      "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK");
}

TEST(OtherLaunchers, WithoutTheStoresHostAllThatEndedAreNamed) {
  const auto result = run_under_mpirun("the_stores_host_is_killed", 3);
  EXPECT_EQ(result.status, 1);
  EXPECT_LT(result.duration, kLongTimeout / 2);
  EXPECT_THAT(result.output,
              HasSubstr("error: all_reduce 'sums' of group default [0, 1, 2] on rank 2: lost the connection to ranks 0, "
                        "1, which have exited or failed"));
}

TEST(OtherLaunchers, OpenMpiVariables) {
  const auto result = run_under_mpirun("sums", 2);
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_THAT(result.output, AllOf(HasSubstr("rank 0 of 2 done"), HasSubstr("rank 1 of 2 done")));
}

TEST(OtherLaunchers, SlurmVariables) {
  const auto result =
      run_by_hand("sums", 2, "SLURM_NTASKS=2 SLURM_STEP_ID=0 SLURM_LAUNCH_NODE_IPADDR=127.0.0.1 MASTER_PORT=" + free_port(),
                  "SLURM_PROCID", "SLURM_LOCALID");
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_THAT(result.output, AllOf(HasSubstr("rank 0 of 2 done"), HasSubstr("rank 1 of 2 done")));
}

/// torchrun with a store of its own on a free port (--standalone), so that several tests can run at once.
ProgramResult run_under_torchrun(const std::string& scenario, int ranks,
                                 const std::map<std::string, std::string>& environment = {}) {
  return run_program({TESSERA_TORCHRUN, "--standalone", "--no-python", "--nproc-per-node", std::to_string(ranks),
                      program_folder() + "/rank_program", scenario},
                     environment, std::chrono::seconds(120));
}

class Torchrun : public ::testing::Test {
 protected:
  void SetUp() override {
    if (std::string_view(TESSERA_TORCHRUN).empty()) GTEST_SKIP() << "no torchrun beside this LibTorch";
  }
};

TEST_F(Torchrun, StartsOurProgramsThroughItsAgentsStore) {
  const auto result = run_under_torchrun("sums", 3);
  EXPECT_EQ(result.status, 0) << result.output;
  for (int rank = 0; rank < 3; ++rank) EXPECT_THAT(result.output, HasSubstr("rank " + std::to_string(rank) + " of 3 done"));
}

TEST_F(Torchrun, AFailureSurfacesInTheOtherRanks) {
  const auto result = run_under_torchrun("last_rank_is_killed", 2);
  EXPECT_NE(result.status, 0);
  EXPECT_THAT(result.left_behind, IsEmpty());
  EXPECT_THAT(result.output, HasSubstr("Signal 9 (SIGKILL)"));
  EXPECT_LT(result.duration, kLongTimeout);
}

TEST_F(Torchrun, ARankThatExitsWithStatus0IsNamed) {
  for (const std::string where : {"second_group", "collective"}) {
    const auto result =
        run_under_torchrun("dies/exit/" + where, 3, {{"TESSERA_TIMEOUT_SECONDS", std::to_string(kLongTimeout.count())}});
    EXPECT_NE(result.status, 0);
    EXPECT_THAT(result.output, HasSubstr("rank 1, which has exited or failed"));
    EXPECT_LT(result.duration, kLongTimeout / 2);
  }
}

} // namespace
} // namespace tessera::testing
