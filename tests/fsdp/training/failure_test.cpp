// Training jobs that go wrong: each ends with an error that names the cause, in time, and leaves no process behind.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <tessera/tests/support/subprocess.h>
#include <tessera/tests/support/test_device.h>

namespace tessera::testing::failure_test {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

ProgramResult run(const std::string& scenario, int ranks, std::map<std::string, std::string> environment = {}) {
  environment.emplace("TESSERA_TIMEOUT_SECONDS", kNeverSeconds);
  auto result = run_program({program_folder() + "/training_program", scenario, "--ranks", std::to_string(ranks)}, environment,
                            std::chrono::seconds(120), Start::kForked);
  EXPECT_THAT(result.left_behind, IsEmpty()) << result.output;
  EXPECT_EQ(result.status, 1) << result.output;
  return result;
}

std::string failing_rank(int ranks) { return "error: rank " + std::to_string(ranks - 1) + " of " + std::to_string(ranks); }

TEST(Failure, ARankKilledInForwardOrBackwardIsNamed) {
  for (const auto* scenario : {"killed_in_forward", "killed_in_backward"}) {
    for (int ranks = 1; ranks <= 4; ++ranks) {
      EXPECT_THAT(run(scenario, ranks).output, HasSubstr(failing_rank(ranks) + " was killed by signal 9 (SIGKILL)")) << scenario;
    }
  }
}

TEST(Failure, ARankThatThrowsInBackwardIsNamedWithItsMessage) {
  for (const int ranks : {1, 3}) {
    EXPECT_THAT(run("throws_in_backward", ranks).output, HasSubstr(failing_rank(ranks) + " failed: the gradient is bad"));
  }
}

TEST(Failure, ARankWhoseRecomputeDiffersIsNamedWithTheFunction) {
  for (const int ranks : {1, 3}) {
    EXPECT_THAT(run("recomputes_differently", ranks).output,
                HasSubstr(failing_rank(ranks) + " failed: recompute of the function: its second run differs from the first"));
  }
}

/// Over gloo, for shared memory is not the allocator's. Beside the CPU on the simulated device, where a scenario has one
/// collective: there a second one goes on with what the first has not brought, where NCCL's would wait for it.
void for_each_device(const std::string& scenario, int ranks, const std::string& compares,
                     const std::function<void(const std::string& output)>& check) {
  std::map<std::string, std::string> environment{{"TESSERA_TRANSPORT", "gloo"}, {"TESSERA_CHECK_COLLECTIVES", compares}};
  const auto run_here = [&] {
    SCOPED_TRACE(scenario + ", " + std::to_string(ranks) + " ranks, compares: " + compares);
    const auto output = run(scenario, ranks, environment).output;
    const auto last = "rank " + std::to_string(ranks - 1);
    for (const auto* when : {" again", " a third time"}) {
      EXPECT_THAT(output, HasSubstr(last + when));
      EXPECT_THAT(output, Not(HasSubstr(last + when + ": no error")));
    }
    check(output);
  };
  run_here();
  if (!tests_the_cpu() || scenario.starts_with("has_no_memory_for_an_outer_gather")) return;
  environment["TESSERA_TEST_DEVICE"] = "sim";
  run_here();
}

TEST(Failure, AllRanksLearnOfAGatherForWhichOneHasNoMemory) {
  for (const auto& [scenario, ranks] : std::vector<std::pair<std::string, int>>{{"has_no_memory_for_a_gather", 2},
                                                                                {"has_no_memory_for_a_gather", 4},
                                                                                {"has_no_memory_for_what_a_gather_sends", 2},
                                                                                {"has_no_memory_for_an_outer_gather", 4}}) {
    const auto last = "rank " + std::to_string(ranks - 1);
    for_each_device(scenario, ranks, "1", [&, ranks = ranks](const std::string& output) {
      EXPECT_THAT(output, HasSubstr(last + " learns: tried to allocate 40"));
      EXPECT_THAT(output, HasSubstr(last + ": all_gather 'tried to allocate 40"));
      for (int rank = 0; rank + 1 < ranks; ++rank)
        EXPECT_THAT(output, ContainsRegex("rank " + std::to_string(rank) + " learns: .*the ranks of the group called different"));
    });
  }
}

/// Those that gather with it then. The others learn of it when these end.
TEST(Failure, RanksOfAGatherInBackwardLearnWhichOneHasNoMemory) {
  for (const std::string scenario : {"has_no_memory_for_an_inner_gather", "has_no_memory_for_a_gather_among_neighbours"}) {
    for_each_device(scenario, 4, "1", [](const std::string& output) {
      EXPECT_THAT(output, HasSubstr("rank 3 learns: tried to allocate 40"));
      EXPECT_THAT(output, ContainsRegex("rank 2 learns: .*rank 3: all_gather 'tried to allocate 40"));
    });
    for_each_device(scenario, 4, "0", [](const std::string& output) {
      EXPECT_THAT(output, HasSubstr("rank 3 learns: tried to allocate 40"));
      EXPECT_THAT(output, ContainsRegex("rank 2 learns: .*lost the connection to rank 3"));
      // Not a gather among all, who wait for something else.
      for (const std::string when : {"again", "a third time"})
        EXPECT_THAT(output, ContainsRegex("rank 3 " + when + ": [^\n]*\\[2, 3\\]"));
    });
  }
}

/// The rank beside it waits for the second gather, when the first has failed between other ranks.
TEST(Failure, TheRanksInsideLearnOfAGatherThatFailsAgain) {
  for_each_device("has_no_memory_for_an_outer_gather_again", 4, "1", [](const std::string& output) {
    EXPECT_THAT(output, ContainsRegex("rank 2 learns: .*rank 3: all_gather 'tried to allocate 40"));
  });
}

/// Nothing that it sends later is taken for the gather.
TEST(Failure, ARankWithoutMemoryForAGatherLeavesAGroupThatDoesNotCompare) {
  for (const auto& [scenario, ranks] : std::vector<std::pair<std::string, int>>{
           {"has_no_memory_for_a_gather", 2}, {"has_no_memory_for_a_gather", 4}, {"has_no_memory_for_an_outer_gather", 4}}) {
    const auto last = "rank " + std::to_string(ranks - 1);
    for_each_device(scenario, ranks, "0", [&, ranks = ranks](const std::string& output) {
      EXPECT_THAT(output, HasSubstr(last + " learns: tried to allocate 40"));
      EXPECT_THAT(output, ContainsRegex(last + " again: .*an earlier failure: tried to allocate 40"));
      for (int rank = 0; rank + 1 < ranks; ++rank)
        EXPECT_THAT(output, ContainsRegex("rank " + std::to_string(rank) + " learns: .*lost the connection to rank"));
    });
  }
}

TEST(Failure, RanksThatUseDifferentGroupsLearnWhichOnes) {
  // A forward gathers ahead in the order of registration: what one left out is seen in the backward.
  const std::map<std::string, std::string> other_group{{"uses_another_group", "'blocks.2'"}, {"skips_a_group", "'blocks.0'"}};
  for (const auto& [scenario, other] : other_group) {
    for (int ranks = 2; ranks <= 4; ++ranks) {
      const auto output = run(scenario, ranks).output;
      EXPECT_THAT(output, HasSubstr("the ranks of the group called different collectives")) << scenario;
      EXPECT_THAT(output, HasSubstr("'blocks.1'")) << scenario;
      EXPECT_THAT(output, HasSubstr(other)) << scenario;
    }
  }
}

TEST(Failure, RanksOfWhichOneLeavesTheTraceLearnWhatEachCalled) {
  for (int ranks = 2; ranks <= 4; ++ranks) {
    const auto output = run("leaves_the_trace", ranks).output;
    EXPECT_THAT(output, HasSubstr("the ranks of the group called different collectives"));
    EXPECT_THAT(output, ContainsRegex("rank 0: all_gather 'blocks.0'"));
    EXPECT_THAT(output, ContainsRegex("rank " + std::to_string(ranks - 1) + ": all_gather 'blocks.1'"));
  }
}

TEST(Failure, RanksThatUseDifferentModelsOrFactorsLearnWhichOnes) {
  const auto models = run("swaps_two_models", 3).output;
  EXPECT_THAT(models, HasSubstr("the ranks of the group called different collectives"));
  EXPECT_THAT(models, HasSubstr("'blocks.0'"));
  EXPECT_THAT(models, HasSubstr("'blocks.0 of model 5'"));
  const auto factors = run("divides_differently", 3).output;
  EXPECT_THAT(factors, HasSubstr("'blocks.0 divided by 3'"));
  EXPECT_THAT(factors, HasSubstr("'blocks.0 divided by 2'"));
}

TEST(Failure, AReadAfterAFailedGatherFailsToo) {
  const auto output = run("reads_after_a_failed_gather", 4).output;
  EXPECT_THAT(output, HasSubstr("rank 2 first: all_gather"));
  EXPECT_THAT(output, HasSubstr("rank 2 again: "));
  EXPECT_THAT(output, Not(HasSubstr("again: no error")));
}

TEST(Failure, AForkedChildEndsAndTheRankTrainsOn) {
  for (const int ranks : {1, 3}) {
    const auto result = run_program({program_folder() + "/training_program", "forks", "--ranks", std::to_string(ranks)}, {},
                                    std::chrono::seconds(60));
    EXPECT_EQ(result.status, 0) << result.output;
    EXPECT_THAT(result.left_behind, IsEmpty());
  }
}

} // namespace
} // namespace tessera::testing::failure_test
