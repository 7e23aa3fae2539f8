// Whole programs that ask for CUDA where there is none: what they print, and that they end.
#include <tessera/tests/support/subprocess.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/collectives/process_context.h>

namespace tessera::testing::cuda_programs_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class CudaPrograms : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda_is_available()) GTEST_SKIP() << "needs a machine without CUDA";
  }

  static ProgramResult run(const std::string& scenario, int ranks, std::map<std::string, std::string> environment = {}) {
    environment.emplace("TESSERA_TIMEOUT_SECONDS", kNeverSeconds);
    auto result = run_program({program_folder() + "/cuda_program", scenario, "--ranks", std::to_string(ranks)}, environment,
                              std::chrono::seconds(120));
    EXPECT_THAT(result.left_behind, IsEmpty()) << result.output;
    return result;
  }
};

TEST_F(CudaPrograms, NameTheMissingDeviceAndEnd) {
  for (const auto* scenario : {"makes_a_mesh", "makes_a_mesh_and_destroys"}) {
    const auto result = run(scenario, 2);
    EXPECT_EQ(result.status, 0) << result.output;
    EXPECT_THAT(result.output, AllOf(HasSubstr("device mesh on cuda: rank 0: no CUDA device: "),
                                     HasSubstr("device mesh on cuda: rank 1: no CUDA device: ")));
  }
}

TEST_F(CudaPrograms, ThatSeedFirstDoNotLoseCuda) {
  auto result = run("seeds_first", 1, {{"TESSERA_LOAD_CUDA", "1"}});
  EXPECT_THAT(result.output, AllOf(HasSubstr("rank 0: no CUDA device: "), HasSubstr("LibTorch has CUDA: 1")));
  result = run("seeds_first", 1,
               {{"TESSERA_LOAD_CUDA", "0"}}); // there the seed has settled it, and the missing device still says more
  EXPECT_THAT(result.output, AllOf(HasSubstr("rank 0: no CUDA device: "), HasSubstr("LibTorch has CUDA: 0")));
}

TEST_F(CudaPrograms, ARankThatDoesNotConnectIsNamedAfterTheTimeout) {
  const auto result = run("last_rank_does_not_connect", 3, {{"TESSERA_TIMEOUT_SECONDS", "2"}});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("rank 2 did not connect a group of these ranks in this order"));
}

TEST_F(CudaPrograms, ARankThatEndedIsNamedAtOnce) {
  const auto result = run("last_rank_ends_before_it_connects", 3);
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("rank 2"));
}

} // namespace
} // namespace tessera::testing::cuda_programs_test
