// How ranks meet: the store, the transport and the settings that they need to agree on.
#include <tessera/tests/collectives/rank_jobs.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>
#include <future>
#include <map>
#include <memory>
#include <string>

namespace tessera::testing::join_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const std::pair<const std::string, std::string> kOverGloo{"TESSERA_TRANSPORT", "gloo"};

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

// They end as they have joined the last one. A fork of rank 0 takes its store along while the others still read in it.
TEST(ProcessGroup, RanksJoinJobAfterJobWhoseStoreRank0Hosts) {
  for (int ranks = 2; ranks <= 4; ++ranks) EXPECT_EQ(run("joins_job_after_job", ranks, {}, Start::kExecuted).status, 0);
  EXPECT_EQ(run("joins_job_after_job", 3, {kOverGloo}, Start::kExecuted).status, 0);
}

TEST(ProcessGroup, RanksJoinThroughAStoreOfTheProgram) {
  for (int ranks = 1; ranks <= 3; ++ranks) {
    const auto result = run("joins_with_a_store_of_its_own", ranks);
    EXPECT_EQ(result.status, 0) << result.output;
  }
}

// How a rank of two ends that looks for the store at this port.
std::string error_of_rank(const std::string& rank, const std::string& port, std::map<std::string, std::string> environment = {}) {
  environment.insert({{"RANK", rank}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", port}});
  environment.emplace("TESSERA_TIMEOUT_SECONDS", "1");
  const auto result = run_rank_program({"sums"}, environment);
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
        {"WORLD_SIZE", "3"}, {"TORCHELASTIC_USE_AGENT_STORE", is_launchers}, {"TESSERA_TIMEOUT_SECONDS", kNeverSeconds}};
    auto error = std::async(std::launch::async, [&] { return error_of_rank("1", port, environment); });
    store->wait({"tessera/0/0/joined/1"}, std::chrono::minutes(1));
    store.reset();
    EXPECT_THAT(error.get(), AllOf(HasSubstr(c10::str("error: init_process_group on rank 1 of 3: lost the store at 127.0.0.1:",
                                                      port, ", ", host, ": ")),
                                   HasSubstr(". See why the process that hosts it has ended"), Not(HasSubstr("frame #"))));
  }
}

} // namespace
} // namespace tessera::testing::join_test
