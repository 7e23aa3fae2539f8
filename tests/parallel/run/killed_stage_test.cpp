// A rank of a pipeline that ends, or throws.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <tessera/tests/support/subprocess.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing::killed_stage_test {
namespace {

TEST(PipelineErrors, NameARankThatIsKilledOnAllOthers) {
  if (world_size() > 1) return; // it starts ranks itself
  for (const int ranks : {2, 3, 4}) {
    const auto result = run_program({program_folder() + "/killed_stage", "--ranks", std::to_string(ranks)},
                                    {{"TESSERA_TIMEOUT_SECONDS", kNeverSeconds}}, std::chrono::seconds(120));
    EXPECT_THAT(result.left_behind, ::testing::IsEmpty()) << result.output;
    EXPECT_EQ(result.status, 1) << result.output;
    const auto killed = ranks / 2;
    for (int rank = 0; rank < ranks; ++rank) {
      if (rank == killed) continue;
      EXPECT_THAT(result.output,
                  ::testing::ContainsRegex(c10::str("rank ", rank, " of the step hears: .*rank ", killed, "[^0-9]")));
    }
  }
}

/// Processes that left each other connect no more.
TEST(PipelineErrors, SayWhyNoOtherPipelineFollows) {
  if (world_size() > 1) return; // it starts ranks itself
  for (const int ranks : {2, 3}) {
    const auto result = run_program({program_folder() + "/killed_stage", "--ranks", std::to_string(ranks), "throw"},
                                    {{"TESSERA_TIMEOUT_SECONDS", kNeverSeconds}}, std::chrono::seconds(120));
    EXPECT_THAT(result.left_behind, ::testing::IsEmpty()) << result.output;
    EXPECT_EQ(result.status, 1) << result.output;
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_THAT(result.output,
                  ::testing::ContainsRegex(c10::str("rank ", rank, " of a new pipeline hears: Pipeline: an earlier one on ",
                                                    "the ranks .* has ended on rank ", ranks / 2, ": out of luck")));
    }
  }
}

} // namespace
} // namespace tessera::testing::killed_stage_test
