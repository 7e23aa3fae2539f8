// Whole jobs that `launch` starts. What depends on the transport names it here.
#include <tessera/tests/collectives/rank_jobs.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <thread>

namespace tessera::testing::launch_test {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

const std::pair<const std::string, std::string> kOverGloo{"TESSERA_TRANSPORT", "gloo"};

TEST(Launch, EveryRankRunsTheWorker) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    const auto result = run("sums", ranks);
    EXPECT_EQ(result.status, 0) << result.output;
    for (int rank = 0; rank < ranks; ++rank)
      EXPECT_THAT(result.output, HasSubstr("rank " + std::to_string(rank) + " of " + std::to_string(ranks) + " done"));
  }
}

TEST(Launch, RanksOfAnExecutedProgramAreExecuted) {
  for (int ranks = 1; ranks <= 2; ++ranks) {
    const auto result = run_program({program_folder() + "/rank_program", "sums", "--ranks", std::to_string(ranks)});
    EXPECT_EQ(result.status, 0) << result.output;
    EXPECT_EQ(count_of(" done", result.output), ranks) << result.output;
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
  EXPECT_THAT(run("threads", 2, {{"OMP_NUM_THREADS", ""}}).output,
              HasSubstr(c10::str("rank 1 has OMP_NUM_THREADS=", std::max(1, cores / 2), "\n")));
}

TEST(Launch, AnEmptyVariableMakesNoRank) {
  const auto result = run("sums", 2, {{"TESSERA_LAUNCH_PIPE", ""}});
  EXPECT_EQ(result.status, 0) << result.output;
}

TEST(Launch, HearsAllOfManyRanksThatThrow) {
  const auto result = run("every_rank_throws", 20); // more than fit into its pipe
  EXPECT_EQ(result.status, 1);
  EXPECT_EQ(count_of("failed: nothing to do", result.output), 20) << result.output;
}

TEST(Launch, ProgramsThatARankStartsEndAtABrokenPipe) {
  const auto result = run("programs_end_at_a_broken_pipe", 2);
  EXPECT_EQ(result.status, 0) << result.output;
}

TEST(Launch, ItsStoreIsOpenedWithinTheTimeout) {
  if (run_program({"unshare", "-rn", "true"}).status != 0) GTEST_SKIP() << "needs a network of its own";
  const auto result = run_program({"unshare", "-rn", program_folder() + "/rank_program", "sums", "--ranks", "2"}, // no loopback
                                  {{"TESSERA_TIMEOUT_SECONDS", "1"}});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("error: launch: cannot open the store of its ranks at 127.0.0.1: "));
}

TEST(Launch, SaysHowManyDescriptorsItNeeds) {
  const auto result = run_program({"sh", "-c", "ulimit -n 20; exec " + program_folder() + "/rank_program sums --ranks 4"});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output,
              HasSubstr("error: launch: cannot open the store of its ranks at 127.0.0.1: this process needs 12 more "
                        "file descriptors for connections"));
}

constexpr const char* kWithoutStreams = " 0<&- 1>&- 2>&-";

TEST(Launch, StreamsThatAreClosedBecomeNoConnections) {
  const auto result =
      run_program({"sh", "-c", program_folder() + "/rank_program closed_streams_are_null --ranks 2" + kWithoutStreams});
  EXPECT_EQ(result.status, 0);
}

TEST(Failure, WithoutSignaturesDifferentSizesAreATimeoutOverGloo) {
  const auto result =
      run("different_sizes", 2, {{"TESSERA_TIMEOUT_SECONDS", "1"}, {"TESSERA_CHECK_COLLECTIVES", "0"}, kOverGloo});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("timed out after 1000 ms, waiting for the "));
}

TEST(Failure, DescriptorsThatDoNotSufficeAreAnErrorBeforeAGroupIsMade) {
  // Executed: whether the others see first that a rank fails or that it has ended depends on how soon it ends.
  const auto raised = run("few_descriptors", 3, {kOverGloo}, Start::kExecuted);
  EXPECT_EQ(raised.status, 0) << raised.output;
  EXPECT_THAT(raised.output, HasSubstr("rank 2 of 3 done"));
  const auto result = run("too_few_descriptors", 3, {kOverGloo}, Start::kExecuted);
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

TEST(Failure, ARankThatEndsAfterItHasSentItsPartIsNotMissedOnAStarvedMachine) {
  const auto result = run("last_rank_ends_and_the_reader_is_held", 2, {{"TESSERA_CHECK_COLLECTIVES", "0"}, kOverGloo});
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_THAT(result.output, HasSubstr("rank 0 of 2 done"));
}

TEST(Failure, LaunchRefusesAProcessGroupThatIsUp) {
  const auto result = run_rank_program({"launch_after_init"});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("launch: a process group is already up in this process"));
}

TEST(Failure, LaunchRefusesASecondLaunchAndAnotherNumberOfRanks) {
  const auto twice = run_rank_program({"launches_twice"});
  EXPECT_EQ(twice.status, 1);
  EXPECT_THAT(twice.output, HasSubstr("launch: called again in a rank; a program launches once"));
  const auto another = run_rank_program({"launches_another_number"});
  EXPECT_EQ(another.status, 1);
  EXPECT_THAT(another.output, HasSubstr("launch: asks for 3 ranks in one of 2"));
}

TEST(Failure, LaunchRefusesAnotherLaunchersRank) {
  const auto result = run_rank_program({"sums", "--ranks", "2"}, {{"RANK", "0"}});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("already a rank of another launcher's job (RANK=0)"));
}

TEST(Failure, LaunchRefusesAProgramThatAnotherLauncherStartedSeveralTimes) {
  for (const std::string name : {"OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"}) {
    const auto result = run_rank_program({"sums", "--ranks", "2"}, {{name, "3"}});
    EXPECT_EQ(result.status, 1);
    EXPECT_THAT(result.output, HasSubstr("launch: another launcher started this program 3 times (" + name + "=3)"));
  }
}

TEST(Failure, LaunchRefusesTheVariablesOfARankThatItIsNot) {
  for (const auto& stale : {std::map<std::string, std::string>{{"TESSERA_LAUNCH_PIPE", "5"}},
                            {{"TESSERA_LAUNCH_PIPE", "5"}, {"TESSERA_LAUNCH_PARENT", "1"}}}) {
    const auto result = run_rank_program({"sums", "--ranks", "2"}, stale);
    EXPECT_EQ(result.status, 1);
    EXPECT_THAT(result.output,
                HasSubstr("launch: the environment describes a rank that process " + std::string(stale.size() > 1 ? "1" : "?") +
                          " has started (TESSERA_LAUNCH_PIPE is set), but that is not this process's parent"));
  }
}

TEST(Launch, AFailedRankIsAnErrorWhereTheEndsOfChildrenAreIgnored) {
  const auto result = run("last_rank_throws_where_its_end_is_ignored", 2);
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("error: rank 1 of 2 failed: no more data"));
}

TEST(Failure, BadRankCounts) {
  EXPECT_THAT(run_rank_program({"sums", "--ranks", "1025"}).output,
              HasSubstr("launch: the number of ranks must be 1 to 1024, not 1025"));
  for (const std::string bad : {"0", "-1", "two", "2x", "", "99999999999"}) {
    const auto result = run_rank_program({"sums", "--ranks", bad});
    EXPECT_EQ(result.status, 1);
    EXPECT_THAT(result.output, HasSubstr("--ranks " + bad + " is not a positive number"));
  }
  EXPECT_THAT(run_rank_program({"sums", "--ranks"}).output, HasSubstr("--ranks needs a number"));
}

TEST(Failure, TheRanksDieWithTheProgram) {
  const auto result = run_program({program_folder() + "/rank_program", "last_rank_never_calls", "--ranks", "2"}, {},
                                  std::chrono::seconds(2)); // which kills the parent
  EXPECT_EQ(result.status, 137);
  EXPECT_THAT(result.left_behind, IsEmpty());
}

} // namespace
} // namespace tessera::testing::launch_test
