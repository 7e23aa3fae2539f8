// Jobs of two hosts with two ranks each: scripts/two-hosts gives each a network, a name and processes of its own.
#include <tessera/tests/support/subprocess.h>

#include <c10/util/StringUtil.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera::testing::hosts_test {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int kNotPermitted = 77;
const std::vector<std::string> kSlowLink{"--rate", "1gbit", "--delay", "1ms"};

class TwoHosts : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto tried = run_program({TESSERA_TWO_HOSTS, "true"});
    if (tried.status == kNotPermitted) GTEST_SKIP() << tried.output;
    ASSERT_EQ(tried.status, 0) << tried.output;
  }

  /// Runs `command` on each, {host} in it being 0 or 1.
  static ProgramResult run(const std::vector<std::string>& link, const std::vector<std::string>& command,
                           const std::map<std::string, std::string>& environment = {}) {
    std::vector<std::string> arguments{TESSERA_TWO_HOSTS};
    arguments.insert(arguments.end(), link.begin(), link.end());
    arguments.insert(arguments.end(), command.begin(), command.end());
    auto result = run_program(arguments, environment, std::chrono::seconds(240));
    EXPECT_THAT(result.left_behind, IsEmpty()) << result.output;
    return result;
  }

  /// Two ranks of the job on each, by hand. A host ends with its command, which therefore waits for both.
  static ProgramResult run_ranks(const std::vector<std::string>& link, const std::string& program,
                                 std::map<std::string, std::string> environment = {}) {
    environment.insert({{"WORLD_SIZE", "4"}, {"MASTER_ADDR", "10.99.0.1"}, {"MASTER_PORT", "29533"}});
    const auto script =
        c10::str("for rank in 0 1; do LOCAL_RANK=$rank RANK=$((2 * {host} + rank)) ", program_folder(), "/", program,
                 " & ranks=\"$ranks $!\"; done; for rank in $ranks; do wait $rank || failed=1; done; exit ${failed:-0}");
    return run(link, {"sh", "-c", script}, environment);
  }
};

TEST_F(TwoHosts, AGroupOfAllRanksIsHierarchical) {
  for (const std::string transport : {"automatic", "gloo"}) {
    const auto result = run_ranks({}, "rank_program transport", {{"TESSERA_TRANSPORT", transport}});
    EXPECT_EQ(result.status, 0) << result.output;
    const std::string all = transport == "gloo" ? "no memory" : "memory";
    EXPECT_THAT(result.output, HasSubstr("of ranks [0, 1, 2, 3] allocates " + all + " that ranks share"));
    EXPECT_THAT(result.output, HasSubstr("of ranks [2, 3] allocates " + all + " that ranks share"));
    EXPECT_THAT(result.output, HasSubstr("of ranks [0, 2] allocates no memory that ranks share"));
  }
}

// Under Kubernetes' PyTorchJob torchrun takes all that from variables.
TEST_F(TwoHosts, TorchrunReadsTheVariablesOfAPyTorchJob) {
  if (std::string_view(TESSERA_TORCHRUN).empty()) GTEST_SKIP() << "no torchrun beside this LibTorch";
  const auto result =
      run({},
          {"sh", "-c",
           c10::str("PET_NODE_RANK={host} ", TESSERA_TORCHRUN, " --no-python -- ", program_folder(), "/rank_program sums")},
          {{"PET_NNODES", "2"}, {"PET_NPROC_PER_NODE", "2"}, {"PET_MASTER_ADDR", "host0"}, {"PET_MASTER_PORT", "29533"}});
  EXPECT_EQ(result.status, 0) << result.output;
  for (const std::string rank : {"0", "1", "2", "3"}) EXPECT_THAT(result.output, HasSubstr("rank " + rank + " of 4 done"));
}

TEST_F(TwoHosts, ShardedTrainingEqualsTheUnshardedOneOverASlowLink) {
  if (std::string_view(TESSERA_TORCHRUN).empty()) GTEST_SKIP() << "no torchrun beside this LibTorch";
  const auto result =
      run(kSlowLink, {TESSERA_TORCHRUN, "--no-python", "--nnodes", "2", "--node-rank", "{host}", "--nproc-per-node", "2",
                      "--master-addr", "10.99.0.1", "--master-port", "29533", "--", program_folder() + "/fsdp_tests",
                      "--gtest_filter=Training.EveryStrategyMatchesTheUnshardedModel"});
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_THAT(result.output, HasSubstr("[       OK ] Training.EveryStrategyMatchesTheUnshardedModel"));
}

TEST_F(TwoHosts, ARankKilledInTheMiddleIsNamedOnBoth) {
  const auto result = run_ranks(kSlowLink, "rank_program killed_in_the_middle_of_an_all_gather");
  for (const std::string survivor : {"0", "1", "2"})
    EXPECT_THAT(result.output, ContainsRegex("all_gather 'big' of group default[^\n]* on rank " + survivor +
                                             ": lost the connection to [^\n]*rank 3, which has exited or failed"));
}

// The ranks of each host miss those of the other. On host 1 the store is gone as well: one of its ranks may have waited for the
// other alone, and nobody can tell it whom that one misses.
TEST_F(TwoHosts, AHostThatVanishesIsNamedOnTheOtherWithinTheTimeout) {
  const auto result =
      run_ranks(kSlowLink, "rank_program cut_off_in_the_middle_of_an_all_gather", {{"TESSERA_TIMEOUT_SECONDS", "5"}});
  EXPECT_FALSE(result.timed_out) << result.output;
  for (const auto& [survivor, named] :
       std::map<std::string, std::string>{{"0", "[23]"}, {"1", "[23]"}, {"2", "[013]"}, {"3", "[012]"}})
    EXPECT_THAT(result.output, ContainsRegex("all_gather 'big' of group default[^\n]* on rank " + survivor +
                                             ": (timed out after 5000 ms|lost the connection)[^\n]* rank " + named));
  EXPECT_THAT(result.output, ContainsRegex("all_gather 'big' of group default[^\n]* on rank [23]: [^\n]* rank [01]"));
}

TEST_F(TwoHosts, AHostNameThatResolvesToNothingIsAnErrorThatSaysSo) {
  const auto result = run_ranks({}, "rank_program sums", {{"MASTER_ADDR", "nowhere.invalid"}, {"TESSERA_TIMEOUT_SECONDS", "3"}});
  EXPECT_NE(result.status, 0);
  EXPECT_THAT(result.output,
              ContainsRegex("error: init_process_group on rank 3 of 4: cannot reach the store at nowhere.invalid:29533"));
}

} // namespace
} // namespace tessera::testing::hosts_test
