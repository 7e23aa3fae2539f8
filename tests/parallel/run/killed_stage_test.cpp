// A rank of a pipeline that ends, or throws.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <tessera/tests/support/subprocess.h>
#include <tessera/tests/support/sweep.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing::killed_stage_test {
namespace {

using ::testing::ContainsRegex, ::testing::HasSubstr;

ProgramResult run_job(int ranks, const std::string& fate, std::map<std::string, std::string> environment = {}) {
  std::vector<std::string> arguments{program_folder() + "/killed_stage", "--ranks", std::to_string(ranks)};
  if (!fate.empty()) arguments.push_back(fate);
  environment.insert({"TESSERA_TIMEOUT_SECONDS", kNeverSeconds});
  auto result = run_program(arguments, environment, std::chrono::seconds(120), Start::kForked);
  EXPECT_THAT(result.left_behind, ::testing::IsEmpty()) << result.output;
  return result;
}

TEST(PipelineErrors, NameARankThatIsKilledOnAllOthers) {
  if (world_size() > 1) return; // it starts ranks itself
  for (const int ranks : {2, 3, 4}) {
    const auto result = run_job(ranks, "");
    EXPECT_EQ(result.status, 1) << result.output;
    const auto killed = ranks / 2;
    for (int rank = 0; rank < ranks; ++rank) {
      if (rank == killed) continue;
      EXPECT_THAT(result.output, ContainsRegex(c10::str("rank ", rank, " of the step hears: .*rank ", killed, "[^0-9]")));
    }
  }
}

/// Twice, over each transport of one host.
TEST(PipelineErrors, AreFollowedByAnotherPipeline) {
  if (world_size() > 1) return; // it starts ranks itself
  for (const std::string transport : {"shared_memory", "gloo"}) {
    for (const int ranks : sweep(std::vector{2, 3, 4}, 2)) {
      SCOPED_TRACE(c10::str(ranks, " ranks over ", transport));
      const auto result = run_job(ranks, "throw", {{"TESSERA_TRANSPORT", transport}});
      EXPECT_EQ(result.status, 0) << result.output;
      const auto thrower = ranks / 2;
      for (int rank = 0; rank < ranks; ++rank) {
        const auto cause =
            rank == thrower ? std::string("out of luck") : c10::str("the pipeline has ended on rank ", thrower, ": out of luck");
        EXPECT_THAT(result.output, HasSubstr(c10::str("rank ", rank, " of the step hears: ", cause)));
        EXPECT_THAT(result.output, HasSubstr(c10::str("rank ", rank, " has gone on as one process")));
      }
      EXPECT_THAT(result.output, HasSubstr(c10::str("lost the connection to rank ", thrower, ", which has left the group")));
    }
  }
}

TEST(PipelineErrors, NameARankThatEndsBeforeTheNextPipeline) {
  if (world_size() > 1) return; // it starts ranks itself
  for (const int ranks : sweep(std::vector{2, 3, 4}, 1)) {
    const auto result = run_job(ranks, "throw-and-end");
    EXPECT_EQ(result.status, 1) << result.output;
    const auto killed = ranks / 2;
    for (int rank = 0; rank < ranks; ++rank) {
      if (rank == killed) continue;
      EXPECT_THAT(result.output,
                  ContainsRegex(c10::str("rank ", rank, " of a new pipeline hears: .*pipeline forward after 1.*rank ", killed,
                                         ", which has exited or failed")));
    }
  }
}

/// What ranks missed before they went on together is no cause.
TEST(PipelineErrors, NameARankThatEndsAfterOthersHaveThrown) {
  if (world_size() > 1) return; // it starts ranks itself
  for (const int ranks : sweep(std::vector{3, 4}, 1)) {
    const auto result = run_job(ranks, "throw-and-another-ends");
    EXPECT_EQ(result.status, 1) << result.output;
    for (int rank = 1; rank < ranks; ++rank)
      EXPECT_THAT(result.output,
                  ContainsRegex(c10::str("rank ", rank, " of the last step hears: .*rank 0, which has exited or failed")));
  }
}

} // namespace
} // namespace tessera::testing::killed_stage_test
