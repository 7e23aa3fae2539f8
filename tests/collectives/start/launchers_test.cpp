// Jobs of four ranks on this machine under the launchers that are installed.
#include <tessera/tests/support/subprocess.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

namespace tessera::testing::launchers_test {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int kNotInstalled = 77;

std::string port_of(int test) { return std::to_string(20000 + (4 * getpid() + test) % 12000); }

void expect_sums(const ProgramResult& result) {
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_THAT(result.left_behind, IsEmpty());
  for (const std::string rank : {"0", "1", "2", "3"}) EXPECT_THAT(result.output, HasSubstr("rank " + rank + " of 4 done"));
}

void expect_the_last_rank_is_named(const ProgramResult& result) {
  EXPECT_THAT(result.left_behind, IsEmpty());
  EXPECT_THAT(result.output, ContainsRegex("error: barrier 'waits for the last rank' of group default \\[0, 1, 2, 3\\] on rank "
                                           "[012]: lost the connection to rank 3, which has exited or failed"));
}

ProgramResult run_under_mpirun(const std::vector<std::string>& options, const std::string& scenario, int test) {
  std::vector<std::string> command{"mpirun",    "-n",   "4",  "--oversubscribe",
                                   "--bind-to", "none", "-x", "MASTER_PORT=" + port_of(test)};
  if (geteuid() == 0) command.emplace_back("--allow-run-as-root");
  command.insert(command.end(), options.begin(), options.end());
  command.insert(command.end(), {program_folder() + "/rank_program", scenario});
  return run_program(command, {{"TESSERA_TIMEOUT_SECONDS", "60"}}, std::chrono::seconds(120));
}

class Mpirun : public ::testing::Test {
 protected:
  void SetUp() override {
    if (run_program({"/bin/sh", "-c", "command -v mpirun"}).status != 0)
      GTEST_SKIP() << "there is no mpirun; on Debian: apt-get install openmpi-bin";
  }
};

TEST_F(Mpirun, RunsAJob) { expect_sums(run_under_mpirun({}, "sums", 0)); }

TEST_F(Mpirun, ARankThatExitsIsNamed) {
  // Otherwise mpirun ends the others before they notice.
  expect_the_last_rank_is_named(run_under_mpirun({"--mca", "orte_abort_on_non_zero_status", "0"}, "last_rank_exits_quietly", 1));
}

ProgramResult run_under_srun(const std::vector<std::string>& options, const std::string& scenario) {
  std::vector<std::string> command{TESSERA_WITH_SLURM, "srun", "--ntasks", "4", "--overcommit"};
  command.insert(command.end(), options.begin(), options.end());
  command.insert(command.end(), {program_folder() + "/rank_program", scenario});
  return run_program(command, {{"TESSERA_TIMEOUT_SECONDS", "60"}}, std::chrono::seconds(120));
}

TEST(Srun, RunsAJob) {
  const auto result = run_under_srun({}, "sums");
  if (result.status == kNotInstalled) GTEST_SKIP() << result.output;
  expect_sums(result);
}

TEST(Srun, AKilledRankIsNamed) {
  const auto result = run_under_srun({"--no-kill", "--kill-on-bad-exit=0"}, "last_rank_is_killed");
  if (result.status == kNotInstalled) GTEST_SKIP() << result.output;
  expect_the_last_rank_is_named(result);
}

} // namespace
} // namespace tessera::testing::launchers_test
