// A random rank fails in a random way at a random moment: the others end in time and name it, and nothing is left.
#include "../support/subprocess.h"
#include "../support/sweep.h"
#include "../support/temporary_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <numeric>
#include <regex>
#include <string>
#include <vector>

namespace tessera::testing {
namespace {

using ::testing::IsEmpty;

struct Case {
  std::string how;
  int seed;
};

std::vector<std::string> files_in(const std::filesystem::path& folder, const std::string& part_of_name) {
  std::vector<std::string> files;
  for (const auto& file : std::filesystem::directory_iterator(folder))
    if (file.path().filename().string().find(part_of_name) != std::string::npos) files.push_back(file.path());
  return files;
}

/// A rank that is out of step calls something on one group while the others may wait for it in another.
bool may_end_in_a_timeout(const Case& each) { return each.how == "stopped" || each.how == "hangs" || each.how == "out-of-step"; }

void run_case(const Case& each) {
  const int ranks = 2 + each.seed % 3;
  const TemporaryFolder folder;
  const auto result =
      run_program({program_folder() + "/rank_program", "random_failure/" + each.how + "/" + std::to_string(each.seed), "--ranks",
                   std::to_string(ranks)},
                  {{"TESSERA_TIMEOUT_SECONDS", may_end_in_a_timeout(each) ? "2" : "60"}, {"TMPDIR", folder.path()}},
                  std::chrono::seconds(120));
  EXPECT_EQ(result.status, 1) << result.output;
  EXPECT_THAT(result.left_behind, IsEmpty());
  EXPECT_THAT(files_in(folder.path(), ""), IsEmpty());
  EXPECT_THAT(files_in("/dev/shm", "tessera"), IsEmpty());
  const std::regex line("rank [0-9]+ names rank [0-9]+ after ([0-9]+) us");
  int named = 0;
  for (std::sregex_iterator match(result.output.begin(), result.output.end(), line), end; match != end; ++match) {
    ++named;
    const auto milliseconds = std::stoll((*match)[1]) / 1000;
    std::printf("  %s, seed %d: named after %lld ms\n", each.how.c_str(), each.seed, static_cast<long long>(milliseconds));
    EXPECT_LT(milliseconds, may_end_in_a_timeout(each) ? 20'000 : 10'000) << result.output; // no test may get near 60 s
  }
  EXPECT_EQ(named, ranks - 1) << result.output;
}

class RandomFailures : public ::testing::TestWithParam<const char*> {};

/// 500 runs in full, over each transport.
TEST_P(RandomFailures, EndInTimeNameTheRankAndLeaveNothing) {
  std::vector<int> seeds(100);
  std::iota(seeds.begin(), seeds.end(), 1);
  for (const int seed : sweep(seeds, 1)) {
    SCOPED_TRACE(seed);
    run_case({GetParam(), seed});
  }
}

/// Rank 0 is out of step, and waits for rank 1, which waits for rank 2, which waits for rank 0.
TEST(RandomFailure, InACircleIsNamedByAll) { run_case({"out-of-step", 86}); }

INSTANTIATE_TEST_SUITE_P(, RandomFailures, ::testing::Values("killed", "throws", "out-of-step", "stopped", "hangs"),
                         [](const auto& info) { return info.param == std::string("out-of-step") ? "out_of_step" : info.param; });

} // namespace
} // namespace tessera::testing
