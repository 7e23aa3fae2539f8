// Whole jobs that go wrong: each ends with an error that names the cause, in time, and leaves no process behind.
#include "../support/subprocess.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>
#include <algorithm>
#include <thread>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr std::chrono::seconds kLongTimeout(60); // TESSERA_TIMEOUT_SECONDS of the jobs: no test may get near it

ProgramResult run(const std::string& scenario, int ranks, std::map<std::string, std::string> environment = {}) {
  environment.emplace("TESSERA_TIMEOUT_SECONDS", std::to_string(kLongTimeout.count()));
  auto result = run_program({program_folder() + "/rank_program", scenario, "--ranks", std::to_string(ranks)}, environment,
                            std::chrono::seconds(120));
  EXPECT_THAT(result.left_behind, IsEmpty()) << result.output;
  EXPECT_LT(result.duration, kLongTimeout / 2) << result.output;
  return result;
}

TEST(Launch, every_rank_runs_the_worker) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    const auto result = run("sums", ranks);
    EXPECT_EQ(result.status, 0) << result.output;
    for (int rank = 0; rank < ranks; ++rank)
      EXPECT_THAT(result.output, HasSubstr("rank " + std::to_string(rank) + " of " + std::to_string(ranks) + " done"));
  }
}

TEST(Launch, ranks_share_the_cores_where_omp_num_threads_is_unset) {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  for (int ranks = 2; ranks <= 4; ++ranks) {
    const auto result = run_program({"/usr/bin/env", "-u", "OMP_NUM_THREADS", program_folder() + "/rank_program", "threads",
                                     "--ranks", std::to_string(ranks)});
    EXPECT_EQ(result.status, 0) << result.output;
    const std::string threads = " has OMP_NUM_THREADS=" + std::to_string(std::max(1, cores / ranks)) + "\n";
    for (int rank = 0; rank < ranks; ++rank) EXPECT_THAT(result.output, HasSubstr("rank " + std::to_string(rank) + threads));
  }
  EXPECT_THAT(run("threads", 2, {{"OMP_NUM_THREADS", "3"}}).output, HasSubstr("rank 1 has OMP_NUM_THREADS=3"));
}

TEST(Failure, a_rank_that_throws_is_named_with_its_message) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    const auto result = run("last_rank_throws", ranks);
    EXPECT_EQ(result.status, 1);
    EXPECT_THAT(result.output,
                HasSubstr("error: rank " + std::to_string(ranks - 1) + " of " + std::to_string(ranks) + " failed: no more data"));
  }
}

TEST(Failure, a_killed_rank_is_named_with_its_signal) {
  for (int ranks = 2; ranks <= 4; ++ranks) {
    const auto result = run("last_rank_is_killed", ranks);
    EXPECT_EQ(result.status, 1);
    EXPECT_THAT(result.output, HasSubstr("error: rank " + std::to_string(ranks - 1) + " of " + std::to_string(ranks) +
                                         " was killed by signal 9 (SIGKILL)"));
  }
}

TEST(Failure, a_rank_killed_in_the_middle_of_a_payload) {
  for (int ranks = 2; ranks <= 3; ++ranks) {
    const auto result = run("killed_in_the_middle_of_an_all_gather", ranks);
    EXPECT_EQ(result.status, 1);
    const auto last = std::to_string(ranks - 1);
    EXPECT_THAT(result.output, HasSubstr("error: rank " + last + " of " + std::to_string(ranks) + " was killed by signal 9"));
    // The survivors noticed by themselves.
    EXPECT_THAT(result.output, HasSubstr("rank 0 then failed: all_gather 'big' of group default"));
    EXPECT_THAT(result.output, HasSubstr("lost the connection to rank " + last + ", which has exited or failed"));
  }
}

TEST(Failure, a_rank_that_exits_with_a_status) {
  const auto result = run("last_rank_exits_quietly", 3);
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("error: rank 2 of 3 exited with status 3"));
}

TEST(Failure, a_rank_that_never_calls_is_named_at_the_timeout) {
  const auto result = run("last_rank_never_calls", 3, {{"TESSERA_TIMEOUT_SECONDS", "1"}});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("barrier 'the last rank does not come' of group default [0, 1, 2] on rank "));
  EXPECT_THAT(result.output, HasSubstr("timed out after 1000 ms, waiting for the call of rank 2"));
  EXPECT_THAT(result.output, HasSubstr("stopped: rank 2"));
}

TEST(Failure, a_rank_that_never_joins_is_named_at_the_timeout) {
  const auto result = run("rank_1_never_joins", 3, {{"TESSERA_TIMEOUT_SECONDS", "1"}});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("timed out after 1000 ms; of 3 ranks these did not come: 1"));
}

TEST(Failure, a_rank_that_orders_a_group_differently_is_named_at_the_timeout) {
  const auto result = run("orders_of_ranks_differ", 3, {{"TESSERA_TIMEOUT_SECONDS", "2"}});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("[0, 1, 2]: rank(s) 1 did not connect a group of these ranks in this order"));
}

TEST(Failure, different_operations_are_an_error_on_every_rank) {
  const auto result = run("different_operations", 3);
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("the ranks of the group called different collectives:"));
  EXPECT_THAT(result.output, HasSubstr("rank 0: broadcast 'weights' (32 bytes of Float, root 0, call 0)"));
  EXPECT_THAT(result.output, HasSubstr("rank 1: all_reduce 'loss' (32 bytes of Float, sum, call 0)"));
  EXPECT_THAT(result.output, HasSubstr("rank 2: all_reduce 'loss' (32 bytes of Float, sum, call 0)"));
}

TEST(Failure, without_signatures_different_sizes_are_a_timeout) {
  const auto result = run("different_sizes", 2, {{"TESSERA_TIMEOUT_SECONDS", "1"}, {"TESSERA_CHECK_COLLECTIVES", "0"}});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("timed out after 1000 ms, waiting for the "));
}

TEST(Failure, launch_refuses_a_process_group_that_is_up) {
  const auto result = run_program({program_folder() + "/rank_program", "launch_after_init"});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("launch: a process group is already up in this process"));
}

TEST(Failure, launch_refuses_a_second_launch_and_another_number_of_ranks) {
  const auto twice = run_program({program_folder() + "/rank_program", "launches_twice"});
  EXPECT_EQ(twice.status, 1);
  EXPECT_THAT(twice.output, HasSubstr("launch: called again in a rank; a program launches once"));
  const auto another = run_program({program_folder() + "/rank_program", "launches_another_number"});
  EXPECT_EQ(another.status, 1);
  EXPECT_THAT(another.output, HasSubstr("launch: asks for 3 ranks in one of 2"));
}

TEST(Failure, launch_refuses_another_launchers_rank) {
  const auto result = run_program({program_folder() + "/rank_program", "sums", "--ranks", "2"}, {{"RANK", "0"}});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("already a rank of another launcher's job (RANK=0)"));
}

TEST(Failure, launch_refuses_a_program_that_another_launcher_started_several_times) {
  for (const std::string name : {"OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"}) {
    const auto result = run_program({program_folder() + "/rank_program", "sums", "--ranks", "2"}, {{name, "3"}});
    EXPECT_EQ(result.status, 1);
    EXPECT_THAT(result.output, HasSubstr("launch: another launcher started this program 3 times (" + name + "=3)"));
  }
}

TEST(Failure, launch_refuses_the_variables_of_a_rank_that_it_is_not) {
  for (const auto& stale : {std::map<std::string, std::string>{{"TESSERA_LAUNCH_PIPE", "5"}},
                            {{"TESSERA_LAUNCH_PIPE", "5"}, {"TESSERA_LAUNCH_PARENT", "1"}}}) {
    const auto result = run_program({program_folder() + "/rank_program", "sums", "--ranks", "2"}, stale);
    EXPECT_EQ(result.status, 1);
    EXPECT_THAT(result.output,
                HasSubstr("launch: the environment describes a rank that process " + std::string(stale.size() > 1 ? "1" : "?") +
                          " has started (TESSERA_LAUNCH_PIPE is set), but that is not this process's parent"));
  }
}

TEST(Failure, bad_rank_counts) {
  EXPECT_THAT(run_program({program_folder() + "/rank_program", "sums", "--ranks", "1025"}).output,
              HasSubstr("launch: the number of ranks must be 1 to 1024, not 1025"));
  for (const std::string bad : {"0", "-1", "two", "2x", "", "99999999999"}) {
    const auto result = run_program({program_folder() + "/rank_program", "sums", "--ranks", bad});
    EXPECT_EQ(result.status, 1);
    EXPECT_THAT(result.output, HasSubstr("--ranks " + bad + " is not a positive number"));
  }
  EXPECT_THAT(run_program({program_folder() + "/rank_program", "sums", "--ranks"}).output, HasSubstr("--ranks needs a number"));
}

TEST(Failure, the_ranks_die_with_the_program) {
  const auto result = run_program({program_folder() + "/rank_program", "last_rank_never_calls", "--ranks", "2"}, {},
                                  std::chrono::seconds(2)); // which kills the parent
  EXPECT_EQ(result.status, 137);
  EXPECT_THAT(result.left_behind, IsEmpty());
}

// Starts two ranks by hand with the variables that other launchers set; rank 0 opens the store.
ProgramResult run_two_ranks(const std::string& common, const std::string& rank_variable, const std::string& local_rank_variable) {
  const auto rank = [&](const char* r) {
    return common + " " + rank_variable + "=" + r + " " + local_rank_variable + "=" + r + " " + program_folder() +
           "/rank_program sums";
  };
  return run_program({"/bin/sh", "-c", rank("0") + " & " + rank("1") + " && wait $!"},
                     {{"TESSERA_TIMEOUT_SECONDS", std::to_string(kLongTimeout.count())}}, std::chrono::seconds(120));
}

// A port that was free a moment ago.
std::string free_port() {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  return std::to_string(c10d::TCPStore("127.0.0.1", options).getPort());
}

// How a rank of two ends that looks for the store at this port.
std::string error_of_rank(const std::string& rank, const std::string& port) {
  const auto result = run_program({program_folder() + "/rank_program", "sums"}, {{"RANK", rank},
                                                                                 {"WORLD_SIZE", "2"},
                                                                                 {"MASTER_ADDR", "127.0.0.1"},
                                                                                 {"MASTER_PORT", port},
                                                                                 {"TESSERA_TIMEOUT_SECONDS", "1"}});
  EXPECT_EQ(result.status, 1);
  return result.output.substr(std::min(result.output.rfind("error: "), result.output.size())); // c10d logs before it
}

TEST(Store, what_accepts_the_connection_and_never_answers_is_an_error_at_the_timeout) {
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

TEST(Store, one_that_cannot_be_opened_or_reached_is_an_error_in_a_line) {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  const c10d::TCPStore somebody("127.0.0.1", options);
  EXPECT_THAT(error_of_rank("0", std::to_string(somebody.getPort())),
              AllOf(HasSubstr("error: init_process_group on rank 0 of 2: cannot open the store at 127.0.0.1:"),
                    HasSubstr("EADDRINUSE"), Not(HasSubstr("frame #"))));
  EXPECT_THAT(error_of_rank("1", free_port()),
              AllOf(HasSubstr("error: init_process_group on rank 1 of 2: cannot reach the store at 127.0.0.1:"),
                    Not(HasSubstr("frame #"))));
}

TEST(OtherLaunchers, open_mpi_variables) {
  const auto result = run_two_ranks("OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2 MASTER_PORT=" + free_port(),
                                    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK");
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_THAT(result.output, AllOf(HasSubstr("rank 0 of 2 done"), HasSubstr("rank 1 of 2 done")));
}

TEST(OtherLaunchers, slurm_variables) {
  const auto result =
      run_two_ranks("SLURM_NTASKS=2 SLURM_STEP_ID=0 SLURM_LAUNCH_NODE_IPADDR=127.0.0.1 MASTER_PORT=" + free_port(),
                    "SLURM_PROCID", "SLURM_LOCALID");
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_THAT(result.output, AllOf(HasSubstr("rank 0 of 2 done"), HasSubstr("rank 1 of 2 done")));
}

TEST(Torchrun, starts_our_programs_through_its_agents_store) {
  const std::string torchrun = TESSERA_TORCHRUN;
  if (torchrun.empty()) GTEST_SKIP() << "no torchrun beside this LibTorch";
  const auto result = run_program({torchrun, "--no-python", "--nproc-per-node", "3", program_folder() + "/rank_program", "sums"},
                                  {}, std::chrono::seconds(120));
  EXPECT_EQ(result.status, 0) << result.output;
  for (int rank = 0; rank < 3; ++rank) EXPECT_THAT(result.output, HasSubstr("rank " + std::to_string(rank) + " of 3 done"));
}

TEST(Torchrun, a_failure_surfaces_in_the_other_ranks) {
  const std::string torchrun = TESSERA_TORCHRUN;
  if (torchrun.empty()) GTEST_SKIP() << "no torchrun beside this LibTorch";
  const auto result =
      run_program({torchrun, "--no-python", "--nproc-per-node", "2", program_folder() + "/rank_program", "last_rank_is_killed"},
                  {}, std::chrono::seconds(120));
  EXPECT_NE(result.status, 0);
  EXPECT_THAT(result.left_behind, IsEmpty());
  EXPECT_THAT(result.output, HasSubstr("Signal 9 (SIGKILL)"));
  EXPECT_LT(result.duration, kLongTimeout);
}

} // namespace
} // namespace tessera::testing
