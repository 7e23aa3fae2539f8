// Whole jobs, and how they start: by `launch` and other launchers, with the store, the transport and the settings that they name.
// What depends on the transport names it here.
#include "rank_jobs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/collectives/record_error.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>
#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <future>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <thread>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
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

int count_of(const std::string& part, const std::string& text) {
  int count = 0;
  for (auto found = text.find(part); found != std::string::npos; found = text.find(part, found + 1)) ++count;
  return count;
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
  EXPECT_LT(result.duration, kLongTimeout / 2);
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

TEST(ProcessGroup, KnowsHowManyRanksAreOnItsHost) {
  const auto output = run("says_how_many_are_here", 4, on_hosts("0121")).output;
  EXPECT_THAT(output, AllOf(HasSubstr("rank 0 is one of 1 on its host"), HasSubstr("rank 1 is one of 2 on its host"),
                            HasSubstr("rank 2 is one of 1 on its host"), HasSubstr("rank 3 is one of 2 on its host")));
}

TEST(ProcessGroup, OneThatWasInAnotherJobMeetsThoseThatWereNot) {
  const auto result = run("rank_1_was_in_a_job_before", 3);
  EXPECT_EQ(result.status, 0) << result.output;
}

TEST(ProcessGroup, ARankThatFailedAfterTheyMetMayJoinAgain) {
  for (const std::string failing : {"0", "1"}) {
    const auto result = run("a_rank_joins_at_its_second_try", 3, {{"RANK_PROGRAM_FAILS_TO_JOIN", failing}});
    EXPECT_EQ(result.status, 0) << result.output;
    EXPECT_THAT(result.output, HasSubstr("this process needs 3 more file descriptors for connections"));
  }
}

TEST(Transport, RanksThatCannotShareMemoryUseGlooWithOneWarning) {
  const std::string reason = "a file may have 1048576 bytes here (ulimit -f), needed are ";
  const auto result = run("small_files", 3, {{"RANK_PROGRAM_SMALL_FILES", "0"}, {"TESSERA_TRANSPORT", "automatic"}});
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_EQ(
      count_of("the ranks of group default cannot share memory and exchange data over gloo, which is slower: rank 0: " + reason,
               result.output),
      1)
      << result.output;
  EXPECT_EQ(count_of(reason, result.output), 1) << result.output;
  EXPECT_THAT(result.output, HasSubstr("rank 2 of 3 done"));
  const auto strict = run("small_files", 3, {{"RANK_PROGRAM_SMALL_FILES", "0"}, {"TESSERA_TRANSPORT", "shared_memory"}});
  EXPECT_EQ(strict.status, 1);
  EXPECT_THAT(strict.output,
              HasSubstr("rank 1 cannot connect group default [0, 1, 2]: the ranks cannot share memory: rank 0: " + reason));
}

TEST(Transport, AnInterfaceThatIsNotThereIsAnErrorThatNamesTheVariable) {
  const auto result = run("sums", 2, {{"TESSERA_TRANSPORT", "gloo"}, {"GLOO_SOCKET_IFNAME", "nonsense0"}});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("environment variable GLOO_SOCKET_IFNAME=nonsense0: "));
}

TEST(Transport, RanksThatHaveNoArenasShareMemoryWithoutThem) {
  const auto result = run("small_files", 3, {{"RANK_PROGRAM_SMALL_FILES", "12"}, {"TESSERA_TRANSPORT", "shared_memory"}});
  EXPECT_EQ(result.status, 0) << result.output;
}

TEST(Transport, WhatIsNotTheSameOnAllRanksIsAnError) {
  const auto result = run("sums", 3, {{"TESSERA_TRANSPORT", "gloo"}, {"RANK_PROGRAM_TRANSPORT_2", "shared_memory"}});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output,
              HasSubstr("init_process_group: the transport (TESSERA_TRANSPORT, ProcessGroupOptions) is gloo on rank 0 "
                        "and shared_memory on rank 2"));
  EXPECT_THAT(run("sums", 2, {{"TESSERA_TRANSPORT", "tcp"}}).output,
              HasSubstr("environment variable TESSERA_TRANSPORT=tcp must be automatic, shared_memory or gloo"));
}

TEST(ProcessGroup, RanksJoinJobAfterJobWhoseStoreRank0Hosts) {
  for (int ranks = 2; ranks <= 4; ++ranks) EXPECT_EQ(run("joins_job_after_job", ranks).status, 0);
  EXPECT_EQ(run("joins_job_after_job", 3, {kOverGloo}).status, 0);
}

TEST(ProcessGroup, RanksJoinThroughAStoreOfTheProgram) {
  for (int ranks = 1; ranks <= 3; ++ranks) {
    const auto result = run("joins_with_a_store_of_its_own", ranks);
    EXPECT_EQ(result.status, 0) << result.output;
  }
}

TEST(Failure, WithoutSignaturesDifferentSizesAreATimeoutOverGloo) {
  const auto result =
      run("different_sizes", 2, {{"TESSERA_TIMEOUT_SECONDS", "1"}, {"TESSERA_CHECK_COLLECTIVES", "0"}, kOverGloo});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("timed out after 1000 ms, waiting for the "));
}

TEST(Failure, DescriptorsThatDoNotSufficeAreAnErrorBeforeAGroupIsMade) {
  const auto raised = run("few_descriptors", 3, {kOverGloo});
  EXPECT_EQ(raised.status, 0) << raised.output;
  EXPECT_THAT(raised.output, HasSubstr("rank 2 of 3 done"));
  const auto result = run("too_few_descriptors", 3, {kOverGloo});
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
  const auto result = run_program({program_folder() + "/rank_program", "launch_after_init"});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("launch: a process group is already up in this process"));
}

TEST(Failure, LaunchRefusesASecondLaunchAndAnotherNumberOfRanks) {
  const auto twice = run_program({program_folder() + "/rank_program", "launches_twice"});
  EXPECT_EQ(twice.status, 1);
  EXPECT_THAT(twice.output, HasSubstr("launch: called again in a rank; a program launches once"));
  const auto another = run_program({program_folder() + "/rank_program", "launches_another_number"});
  EXPECT_EQ(another.status, 1);
  EXPECT_THAT(another.output, HasSubstr("launch: asks for 3 ranks in one of 2"));
}

TEST(Failure, LaunchRefusesAnotherLaunchersRank) {
  const auto result = run_program({program_folder() + "/rank_program", "sums", "--ranks", "2"}, {{"RANK", "0"}});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("already a rank of another launcher's job (RANK=0)"));
}

TEST(Failure, LaunchRefusesAProgramThatAnotherLauncherStartedSeveralTimes) {
  for (const std::string name : {"OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"}) {
    const auto result = run_program({program_folder() + "/rank_program", "sums", "--ranks", "2"}, {{name, "3"}});
    EXPECT_EQ(result.status, 1);
    EXPECT_THAT(result.output, HasSubstr("launch: another launcher started this program 3 times (" + name + "=3)"));
  }
}

TEST(Failure, LaunchRefusesTheVariablesOfARankThatItIsNot) {
  for (const auto& stale : {std::map<std::string, std::string>{{"TESSERA_LAUNCH_PIPE", "5"}},
                            {{"TESSERA_LAUNCH_PIPE", "5"}, {"TESSERA_LAUNCH_PARENT", "1"}}}) {
    const auto result = run_program({program_folder() + "/rank_program", "sums", "--ranks", "2"}, stale);
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
  EXPECT_THAT(run_program({program_folder() + "/rank_program", "sums", "--ranks", "1025"}).output,
              HasSubstr("launch: the number of ranks must be 1 to 1024, not 1025"));
  for (const std::string bad : {"0", "-1", "two", "2x", "", "99999999999"}) {
    const auto result = run_program({program_folder() + "/rank_program", "sums", "--ranks", bad});
    EXPECT_EQ(result.status, 1);
    EXPECT_THAT(result.output, HasSubstr("--ranks " + bad + " is not a positive number"));
  }
  EXPECT_THAT(run_program({program_folder() + "/rank_program", "sums", "--ranks"}).output, HasSubstr("--ranks needs a number"));
}

TEST(Failure, TheRanksDieWithTheProgram) {
  const auto result = run_program({program_folder() + "/rank_program", "last_rank_never_calls", "--ranks", "2"}, {},
                                  std::chrono::seconds(2)); // which kills the parent
  EXPECT_EQ(result.status, 137);
  EXPECT_THAT(result.left_behind, IsEmpty());
}

// Starts ranks by hand with the variables that other launchers set; rank 0 opens the store. The last one's status, if not 0.
ProgramResult run_by_hand(const std::string& scenario, int ranks, const std::string& common, const std::string& rank_variable,
                          const std::string& local_rank_variable) {
  std::string script;
  for (int rank = 0; rank < ranks; ++rank)
    script += c10::str(common, " ", rank_variable, "=", rank, " ", local_rank_variable, "=", rank, " ", program_folder(),
                       "/rank_program ", scenario, rank + 1 < ranks ? " & " : " && wait $!");
  return run_program({"/bin/sh", "-c", script}, {{"TESSERA_TIMEOUT_SECONDS", std::to_string(kLongTimeout.count())}},
                     std::chrono::seconds(120));
}

// A port below those that the system gives to whoever asks for any: nobody takes it between here and rank 0's store.
std::string free_port() {
  static int calls = 0;
  return std::to_string(20000 + (4 * getpid() + calls++) % 12000);
}

// How a rank of two ends that looks for the store at this port.
std::string error_of_rank(const std::string& rank, const std::string& port, std::map<std::string, std::string> environment = {}) {
  environment.insert({{"RANK", rank}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", port}});
  environment.emplace("TESSERA_TIMEOUT_SECONDS", "1");
  const auto result = run_program({program_folder() + "/rank_program", "sums"}, environment);
  EXPECT_EQ(result.status, 1);
  // c10d logs before it, and behind it where its own attempt is given up.
  const auto error = result.output.substr(std::min(result.output.rfind("error: "), result.output.size()));
  return error.substr(0, error.find("\n["));
}

TEST(Store, WhatAcceptsTheConnectionAndNeverAnswersIsAnErrorAtTheTimeout) {
  const int listening = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  ASSERT_EQ(bind(listening, reinterpret_cast<sockaddr*>(&address), length), 0);
  ASSERT_EQ(listen(listening, 4), 0);
  ASSERT_EQ(getsockname(listening, reinterpret_cast<sockaddr*>(&address), &length), 0);
  EXPECT_THAT(error_of_rank("1", std::to_string(ntohs(address.sin_port))),
              AllOf(HasSubstr("error: init_process_group on rank 1 of 2: cannot reach the store at 127.0.0.1:"),
                    HasSubstr("nothing answers there, or what answers is no store")));
  close(listening);
}

TEST(Store, OneThatCannotBeOpenedOrReachedIsAnErrorInALine) {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  const c10d::TCPStore somebody("127.0.0.1", options);
  for (const std::string ranks_here : {"1", "2"}) // the ranks may all be on this host, or not
    EXPECT_THAT(error_of_rank("0", std::to_string(somebody.getPort()), {{"LOCAL_WORLD_SIZE", ranks_here}}),
                AllOf(HasSubstr("error: init_process_group on rank 0 of 2: cannot open the store at 127.0.0.1:"),
                      HasSubstr(ranks_here == "1" ? "EADDRINUSE" : "Address already in use"), Not(HasSubstr("frame #")),
                      HasSubstr(". Choose a MASTER_PORT that no other program has. A store that the program itself has there "
                                "already is for ProcessGroupOptions::own_store")));
  EXPECT_THAT(error_of_rank("1", free_port()),
              AllOf(HasSubstr("error: init_process_group on rank 1 of 2: cannot reach the store at 127.0.0.1:"),
                    Not(HasSubstr("frame #"))));
}

TEST(Store, OneThatEndsWhileRanksMeetIsNamed) {
  for (const auto& [is_launchers, host] : {std::pair("False", "which rank 0 hosts"), {"True", "which the launcher hosts"}}) {
    const c10d::TCPStoreOptions options{.port = 0, .isServer = true, .waitWorkers = false};
    auto store = std::make_unique<c10d::TCPStore>("127.0.0.1", options);
    const auto port = std::to_string(store->getPort());
    const std::map<std::string, std::string> environment{
        {"WORLD_SIZE", "3"}, {"TORCHELASTIC_USE_AGENT_STORE", is_launchers}, {"TESSERA_TIMEOUT_SECONDS", "60"}};
    auto error = std::async(std::launch::async, [&] { return error_of_rank("1", port, environment); });
    store->wait({"tessera/0/0/joined/1"}, kLongTimeout);
    store.reset();
    EXPECT_THAT(error.get(), AllOf(HasSubstr(c10::str("error: init_process_group on rank 1 of 3: lost the store at 127.0.0.1:",
                                                      port, ", ", host, ": ")),
                                   HasSubstr(". See why the process that hosts it has ended"), Not(HasSubstr("frame #"))));
  }
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
    EXPECT_LT(result.duration, kLongTimeout / 2);
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
  const auto result = run_under_torchrun("last_rank_is_killed", 2);
  EXPECT_NE(result.status, 0);
  EXPECT_THAT(result.left_behind, IsEmpty());
  EXPECT_THAT(result.output, HasSubstr("Signal 9 (SIGKILL)"));
  EXPECT_LT(result.duration, kLongTimeout);
}

TEST_F(Torchrun, ShowsTheTextOfARecordedFailure) {
  const auto result = run_under_torchrun("recorded/last_rank_throws", 2);
  EXPECT_NE(result.status, 0);
  EXPECT_THAT(result.output, ContainsRegex("rank      : 1 .*\n.*\n  error_file: /.*\n  traceback : no more data\n"));
}

TEST_F(Torchrun, ARankThatExitsWithStatus0IsNamed) {
  for (const auto& [where, transport] :
       {std::pair("second_group", "automatic"), {"collective", "automatic"}, {"collective", "gloo"}}) {
    const auto result =
        run_under_torchrun(c10::str("dies/exit/", where), 3,
                           {{"TESSERA_TIMEOUT_SECONDS", std::to_string(kLongTimeout.count())}, {"TESSERA_TRANSPORT", transport}});
    EXPECT_NE(result.status, 0);
    EXPECT_THAT(result.output, HasSubstr("rank 1, which has exited or failed"));
    EXPECT_LT(result.duration, kLongTimeout / 2);
  }
}

} // namespace
} // namespace tessera::testing
