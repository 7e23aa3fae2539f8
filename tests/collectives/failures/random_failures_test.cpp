// A random rank fails in a random way at a random moment: the others end in time and name it, and nothing is left.
#include <tessera/tests/support/subprocess.h>
#include <tessera/tests/support/sweep.h>
#include <tessera/tests/support/temporary_folder.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <numeric>
#include <regex>
#include <string>
#include <vector>

namespace tessera::testing::random_failures_test {
namespace {

using ::testing::IsEmpty;

struct Case {
  std::string how;
  int seed;
  std::string hosts; ///< the host of each rank, a digit each

  int ranks() const { return static_cast<int>(hosts.size()); }
};

Case on_one_host(const std::string& how, int seed) { return {how, seed, std::string(2 + seed % 3, '0')}; }

Case over_hosts(const std::string& how, int seed) {
  const std::vector<std::string> layouts = {"01", "0011", "001", "0101", "010", "0012"};
  return {how, seed, layouts[seed % layouts.size()]};
}

std::vector<std::string> files_in(const std::filesystem::path& folder, const std::string& part_of_name) {
  std::vector<std::string> files;
  for (const auto& file : std::filesystem::directory_iterator(folder))
    if (file.path().filename().string().find(part_of_name) != std::string::npos) files.push_back(file.path());
  return files;
}

/// A rank that is out of step calls something on one group while the others may wait for it in another.
bool may_end_in_a_timeout(const Case& each) { return each.how == "stopped" || each.how == "hangs" || each.how == "out-of-step"; }

/// A job that is too slow to start in its timeout, on a machine with much other work, has not got as far as the failure.
bool has_started(const ProgramResult& result) { return result.output.find("init_process_group on rank") == std::string::npos; }

/// How long the slowest rank took to name the failed one, in milliseconds.
long long run_case(const Case& each) {
  const TemporaryFolder folder;
  std::map<std::string, std::string> environment = {{"TESSERA_TIMEOUT_SECONDS", may_end_in_a_timeout(each) ? "2" : kNeverSeconds},
                                                    {"TMPDIR", folder.path()}};
  if (each.hosts != std::string(each.hosts.size(), '0'))
    environment.insert({{"RANK_PROGRAM_HOSTS", each.hosts}, {"GLOO_SOCKET_IFNAME", "lo"}});
  const std::vector<std::string> command = {program_folder() + "/rank_program",
                                            "random_failure/" + each.how + "/" + std::to_string(each.seed), "--ranks",
                                            std::to_string(each.ranks())};
  auto result = run_program(command, environment, std::chrono::seconds(120), Start::kForked);
  for (int again = 0; again < 2 && !has_started(result); ++again)
    result = run_program(command, environment, std::chrono::seconds(120), Start::kForked);
  EXPECT_EQ(result.status, 1) << result.output;
  EXPECT_THAT(result.left_behind, IsEmpty());
  EXPECT_THAT(files_in(folder.path(), ""), IsEmpty());
  EXPECT_THAT(files_in("/dev/shm", "tessera"), IsEmpty());
  const std::regex line("rank [0-9]+ names rank [0-9]+ after ([0-9]+) us");
  int named = 0;
  long long slowest = 0;
  for (std::sregex_iterator match(result.output.begin(), result.output.end(), line), end; match != end; ++match) {
    ++named;
    const long long milliseconds = std::stoll((*match)[1]) / 1000;
    std::printf("  %s, seed %d: named after %lld ms\n", each.how.c_str(), each.seed, milliseconds);
    slowest = std::max(slowest, milliseconds);
  }
  EXPECT_EQ(named, each.ranks() - 1) << result.output;
  return slowest;
}

class RandomFailures : public ::testing::TestWithParam<const char*> {};

void run_cases(Case (*make)(const std::string&, int), const std::string& how) {
  std::vector<int> seeds(100);
  std::iota(seeds.begin(), seeds.end(), 1);
  const auto chosen = sweep(seeds, 1);
  long long slowest = 0;
  for (const int seed : chosen) {
    SCOPED_TRACE(seed);
    slowest = std::max(slowest, run_case(make(how, seed)));
  }
  std::printf("%s, %zu runs: named after at most %lld ms\n", how.c_str(), chosen.size(), slowest);
}

/// 500 runs in full, over each transport. A rank is named alone, or in a list of those that are late.
TEST_P(RandomFailures, EndInTimeNameTheRankAndLeaveNothing) { run_cases(on_one_host, GetParam()); }

TEST_P(RandomFailures, OverHostsEndInTimeNameTheRankAndLeaveNothing) {
  if (std::getenv("TESSERA_TRANSPORT") != nullptr) GTEST_SKIP() << "over gloo alone hosts make no difference";
  run_cases(over_hosts, GetParam());
}

/// Rank 0 is out of step, and waits for rank 1, which waits for rank 2, which waits for rank 0.
TEST(RandomFailure, InACircleIsNamedByAll) { run_case(on_one_host("out-of-step", 86)); }

INSTANTIATE_TEST_SUITE_P(, RandomFailures, ::testing::Values("killed", "throws", "out-of-step", "stopped", "hangs"),
                         [](const auto& info) { return info.param == std::string("out-of-step") ? "out_of_step" : info.param; });

} // namespace
} // namespace tessera::testing::random_failures_test
