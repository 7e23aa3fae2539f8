// Jobs that other launchers start: by the variables of Open MPI and Slurm, and by torchrun.
#include <tessera/tests/collectives/rank_jobs.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/collectives/record_error.h>

#include <unistd.h>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>

namespace tessera::testing::other_launchers_test {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr const char* kWithoutStreams = " 0<&- 1>&- 2>&-";

// Starts ranks by hand with the variables that other launchers set; rank 0 opens the store. The last one's status, if not 0.
ProgramResult run_by_hand(const std::string& scenario, int ranks, const std::string& common, const std::string& rank_variable,
                          const std::string& local_rank_variable) {
  std::string script;
  for (int rank = 0; rank < ranks; ++rank)
    script += c10::str(common, " ", rank_variable, "=", rank, " ", local_rank_variable, "=", rank, " ", program_folder(),
                       "/rank_program ", scenario, rank + 1 < ranks ? " & " : " && wait $!");
  return run_program({"/bin/sh", "-c", script}, {{"TESSERA_TIMEOUT_SECONDS", kNeverSeconds}}, std::chrono::seconds(120));
}

ProgramResult run_under_mpirun(const std::string& scenario, int ranks, const std::string& settings = "") {
  return run_by_hand(
      scenario, ranks,
      c10::str(settings, " OMPI_COMM_WORLD_SIZE=", ranks, " OMPI_COMM_WORLD_LOCAL_SIZE=", ranks, " MASTER_PORT=", free_port()),
      "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK");
}

TEST(OtherLaunchers, WithoutTheStoresHostAllThatEndedAreNamed) {
  for (const std::string settings : {"", "TESSERA_TRANSPORT=gloo"}) {
    const auto result = run_under_mpirun("the_stores_host_is_killed", 3, settings);
    EXPECT_EQ(result.status, 1);
    EXPECT_THAT(result.output,
                HasSubstr("error: all_reduce 'sums' of group default [0, 1, 2] on rank 2: lost the connection to ranks 0, "
                          "1, which have exited or failed"));
  }
}

TEST(OtherLaunchers, OpenMpiVariables) {
  const auto result = run_under_mpirun("sums", 2);
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_THAT(result.output, AllOf(HasSubstr("rank 0 of 2 done"), HasSubstr("rank 1 of 2 done")));
}

TEST(OtherLaunchers, StreamsThatAreClosedBecomeNoConnections) {
  EXPECT_EQ(run_under_mpirun(c10::str("closed_streams_are_null", kWithoutStreams), 2).status, 0);
}

TEST(OtherLaunchers, SlurmVariables) {
  const auto result =
      run_by_hand("sums", 2, "SLURM_NTASKS=2 SLURM_STEP_ID=0 SLURM_LAUNCH_NODE_IPADDR=127.0.0.1 MASTER_PORT=" + free_port(),
                  "SLURM_PROCID", "SLURM_LOCALID");
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_THAT(result.output, AllOf(HasSubstr("rank 0 of 2 done"), HasSubstr("rank 1 of 2 done")));
}

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(RecordError, WritesWhatIsThrownWhereTorchrunReadsIt) {
  const auto path = c10::str(::testing::TempDir(), "/error-", getpid(), ".json");
  setenv("TORCHELASTIC_ERROR_FILE", path.c_str(), 1);
  EXPECT_EQ(record([] { return 3; }), 3);
  EXPECT_EQ(text_of(path), "");
  EXPECT_THROW(record([]() -> int { throw std::runtime_error("a \"text\" in\ntwo lines"); }), std::runtime_error);
  const std::string time = R"(\{"message":\{"extraInfo":\{"timestamp":"1[0-9]+"\},"message":)";
  EXPECT_THAT(text_of(path), ContainsRegex("^" + time + R"("a \\"text\\" in\\ntwo lines"\}\}$)"));
  record_error(std::runtime_error("no \xff text"));
  EXPECT_THAT(text_of(path), ContainsRegex(time + R"("no \\ufffd text"\}\}$)")) << "the file is replaced";
  EXPECT_THROW(record([] { throw 7; }), int);
  EXPECT_THAT(text_of(path), HasSubstr("an exception that is no std::exception"));
  unlink(path.c_str());
  setenv("TORCHELASTIC_ERROR_FILE", "/there is no/such folder", 1);
  record_error(std::runtime_error("only a warning follows"));
  unsetenv("TORCHELASTIC_ERROR_FILE");
  record_error(std::runtime_error("nothing"));
  EXPECT_EQ(text_of(path), "");
}

TEST(RecordError, RunMainReturnsAStatusAndSaysWhatWasThrown) {
  EXPECT_EQ(run_main([] { return 3; }), 3);
  const auto path = c10::str(::testing::TempDir(), "/error-", getpid(), ".json");
  const auto result = run_rank_program({"run_main_throws"}, {{"TORCHELASTIC_ERROR_FILE", path}});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, AllOf(HasSubstr("no more data\n"), Not(HasSubstr("terminate"))));
  EXPECT_THAT(text_of(path), HasSubstr("\"message\":\"no more data\""));
  unlink(path.c_str());
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
  const auto result = run_under_torchrun("last_rank_is_killed", 2, {{"TESSERA_TIMEOUT_SECONDS", kNeverSeconds}});
  EXPECT_NE(result.status, 0);
  EXPECT_FALSE(result.timed_out);
  EXPECT_THAT(result.left_behind, IsEmpty());
  EXPECT_THAT(result.output, HasSubstr("Signal 9 (SIGKILL)"));
}

TEST_F(Torchrun, ShowsTheTextOfARecordedFailure) {
  const auto result = run_under_torchrun("recorded/last_rank_throws", 2);
  EXPECT_NE(result.status, 0);
  EXPECT_THAT(result.output, ContainsRegex("rank      : 1 .*\n.*\n  error_file: /.*\n  traceback : no more data\n"));
}

TEST_F(Torchrun, ARankThatExitsWithStatus0IsNamed) {
  for (const auto& [where, transport] :
       {std::pair("second_group", "automatic"), {"collective", "automatic"}, {"collective", "gloo"}}) {
    const auto result = run_under_torchrun(c10::str("dies/exit/", where), 3,
                                           {{"TESSERA_TIMEOUT_SECONDS", kNeverSeconds}, {"TESSERA_TRANSPORT", transport}});
    EXPECT_NE(result.status, 0);
    EXPECT_FALSE(result.timed_out);
    EXPECT_THAT(result.output, HasSubstr("rank 1, which has exited or failed"));
  }
}

} // namespace
} // namespace tessera::testing::other_launchers_test
