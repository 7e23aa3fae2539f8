#include <tessera/tests/support/matchers.h>

#include <tessera/collectives/ranks/job_environment.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <set>
#include <string>

namespace tessera::job_environment_test {
namespace {

using Launcher = internal::JobEnvironment::Launcher;

const internal::EnvironmentMap kTorchrun{
    {"RANK", "3"},           {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "2"}, {"MASTER_ADDR", "node0"},
    {"MASTER_PORT", "29501"}};
const internal::EnvironmentMap kOpenMpi{{"OMPI_COMM_WORLD_RANK", "1"},
                                        {"OMPI_COMM_WORLD_SIZE", "2"},
                                        {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                        {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                                        {"MASTER_PORT", "29501"}};
const internal::EnvironmentMap kSlurm{{"SLURM_PROCID", "5"},     {"SLURM_NTASKS", "6"},
                                      {"SLURM_LOCALID", "2"},    {"SLURM_STEP_ID", "0"},
                                      {"SLURM_JOB_ID", "70000"}, {"SLURM_LAUNCH_NODE_IPADDR", "10.0.0.7"}};

internal::EnvironmentMap with(internal::EnvironmentMap map, const std::string& name, const std::string& value) {
  map[name] = value;
  return map;
}

internal::EnvironmentMap without(internal::EnvironmentMap map, const std::string& name) {
  map.erase(name);
  return map;
}

TEST(JobEnvironment, NothingSetIsOneRankWithoutAStore) {
  const auto job = internal::parse_job_environment({{"PATH", "/bin"}});
  EXPECT_EQ(job.launcher, Launcher::kNone);
  EXPECT_EQ(job.rank, 0);
  EXPECT_EQ(job.world_size, 1);
  EXPECT_EQ(job.store_host, "");
}

TEST(JobEnvironment, Torchrun) {
  auto job = internal::parse_job_environment(kTorchrun);
  EXPECT_EQ(job.launcher, Launcher::kTorchrun);
  EXPECT_EQ(job.rank, 3);
  EXPECT_EQ(job.world_size, 8);
  EXPECT_EQ(job.local_rank, 1);
  EXPECT_EQ(job.store_host, "node0");
  EXPECT_EQ(job.store_port, 29501);
  EXPECT_FALSE(job.store_is_hosted);
  EXPECT_FALSE(job.is_on_one_host);
  EXPECT_TRUE(internal::parse_job_environment(with(kTorchrun, "LOCAL_WORLD_SIZE", "8")).is_on_one_host);
  EXPECT_FALSE(internal::parse_job_environment(without(kTorchrun, "LOCAL_WORLD_SIZE")).is_on_one_host);
  job = internal::parse_job_environment(
      with(with(kTorchrun, "TORCHELASTIC_USE_AGENT_STORE", "True"), "TORCHELASTIC_RESTART_COUNT", "2"));
  EXPECT_TRUE(job.store_is_hosted);
  EXPECT_EQ(job.restart, 2);
  EXPECT_EQ(internal::parse_job_environment(without(without(kTorchrun, "LOCAL_RANK"), "LOCAL_WORLD_SIZE")).local_rank, 3);
  EXPECT_EQ(internal::parse_job_environment(with(kTorchrun, "TESSERA_LAUNCH_PIPE", "5")).launcher, Launcher::kTessera);
  EXPECT_EQ(internal::parse_job_environment({{"RANK", "0"}, {"WORLD_SIZE", "1"}}).store_host, "");
}

TEST(JobEnvironment, TorchrunIncompleteOrContradictory) {
  EXPECT_THROWS_WITH(internal::parse_job_environment(without(kTorchrun, "RANK")),
                     "environment variable RANK is not set, but WORLD_SIZE=8 is");
  EXPECT_THROWS_WITH(internal::parse_job_environment(without(kTorchrun, "WORLD_SIZE")),
                     "environment variable WORLD_SIZE is not set, but RANK=3 is");
  EXPECT_THROWS_WITH(internal::parse_job_environment(without(kTorchrun, "MASTER_ADDR")),
                     "environment variable MASTER_ADDR is not set, but WORLD_SIZE=8 is");
  EXPECT_THROWS_WITH(internal::parse_job_environment(without(kTorchrun, "MASTER_PORT")),
                     "environment variable MASTER_PORT is not set, but WORLD_SIZE=8 is");
  EXPECT_THROWS_WITH(internal::parse_job_environment(with(kTorchrun, "RANK", "8")),
                     "environment variable RANK=8 must be less than WORLD_SIZE=8");
  EXPECT_THROWS_WITH(internal::parse_job_environment(with(kTorchrun, "WORLD_SIZE", "0")),
                     "environment variable WORLD_SIZE=0 must be at least 1");
  EXPECT_THROWS_WITH(internal::parse_job_environment(with(kTorchrun, "RANK", "one")),
                     "environment variable RANK=one is not an integer between 0 and 2147483647");
  EXPECT_THROWS_WITH(internal::parse_job_environment(with(kTorchrun, "RANK", "-1")),
                     "environment variable RANK=-1 is not an integer between 0 and 2147483647");
  EXPECT_THROWS_WITH(internal::parse_job_environment(with(kTorchrun, "LOCAL_RANK", "2")),
                     "environment variable LOCAL_RANK=2 must be less than LOCAL_WORLD_SIZE=2");
  EXPECT_THROWS_WITH(internal::parse_job_environment(with(kTorchrun, "LOCAL_WORLD_SIZE", "9")),
                     "environment variable LOCAL_WORLD_SIZE=9 exceeds WORLD_SIZE=8");
  EXPECT_THROWS_WITH(internal::parse_job_environment(with(kTorchrun, "MASTER_PORT", "70000")),
                     "environment variable MASTER_PORT=70000 is not a port (1 to 65535)");
}

TEST(JobEnvironment, OpenMpi) {
  const auto job = internal::parse_job_environment(kOpenMpi);
  EXPECT_EQ(job.launcher, Launcher::kOpenMpi);
  EXPECT_EQ(job.rank, 1);
  EXPECT_EQ(job.world_size, 2);
  EXPECT_EQ(job.local_rank, 1);
  EXPECT_EQ(job.store_host, "127.0.0.1");
  EXPECT_EQ(job.store_port, 29501);
  EXPECT_TRUE(job.is_on_one_host);
  EXPECT_EQ(internal::parse_job_environment(with(kOpenMpi, "MASTER_ADDR", "node0")).store_host, "node0");
  EXPECT_THROWS_WITH(internal::parse_job_environment(without(kOpenMpi, "MASTER_PORT")),
                     "environment variable MASTER_PORT is not set, but OMPI_COMM_WORLD_RANK=1 is");
  EXPECT_THROWS_WITH(internal::parse_job_environment(with(kOpenMpi, "OMPI_COMM_WORLD_LOCAL_SIZE", "1")),
                     "environment variable MASTER_ADDR is not set, but OMPI_COMM_WORLD_LOCAL_SIZE=1 of OMPI_COMM_WORLD_SIZE=2");
  EXPECT_THROWS_WITH(internal::parse_job_environment(without(kOpenMpi, "OMPI_COMM_WORLD_SIZE")),
                     "environment variable OMPI_COMM_WORLD_SIZE is not set, but OMPI_COMM_WORLD_RANK=1 is");
}

TEST(JobEnvironment, ATimeoutThatIsTooLongOrNoneIsAnError) {
  for (const auto timeout : {std::chrono::milliseconds::max(), std::chrono::milliseconds(0)})
    EXPECT_THROWS_WITH(internal::with_overrides({.timeout = timeout}, {}),
                       "the process group's timeout must be positive and at most 9999999 s, not ");
}

TEST(JobEnvironment, TheTimeoutIsAWholeNumberOfSeconds) {
  const auto seconds_of = [](const std::string& value) {
    return internal::timeout_seconds_or(600, {{"TESSERA_TIMEOUT_SECONDS", value}});
  };
  EXPECT_EQ(internal::timeout_seconds_or(600, {}), 600);
  EXPECT_EQ(seconds_of(""), 600);
  for (const std::string value : {"60", " 60", "60 ", "+60", "60\n"}) EXPECT_EQ(seconds_of(value), 60);
  EXPECT_EQ(seconds_of("9999999"), 9'999'999);
  for (const std::string value : {"abc", "0", "-5", "1.5", "60s", " ", "10000000", "99999999999"})
    EXPECT_THROWS_WITH(seconds_of(value), "environment variable TESSERA_TIMEOUT_SECONDS=" + value +
                                              " is not a whole number of seconds between 1 and 9999999");
}

TEST(JobEnvironment, AWaitSpinsForAWholeNumberOfMicroseconds) {
  const auto spin_of = [](const std::string& value) {
    return internal::with_overrides({}, {{"TESSERA_SPIN_MICROSECONDS", value}}).spin.count();
  };
  EXPECT_EQ(spin_of(""), 50);
  EXPECT_EQ(spin_of("0"), 0);
  EXPECT_EQ(spin_of("1000000"), 1'000'000);
  EXPECT_EQ(internal::with_overrides({.spin = std::chrono::microseconds(7)}, {}).spin.count(), 7);
  for (const std::string value : {"-1", "1000001", "50us", "0.5"})
    EXPECT_THROWS_WITH(spin_of(value), "environment variable TESSERA_SPIN_MICROSECONDS=" + value +
                                           " is not a whole number of microseconds between 0 and 1000000");
  for (const auto spin : {std::chrono::microseconds(-1), std::chrono::microseconds::max()})
    EXPECT_THROWS_WITH(internal::with_overrides({.spin = spin}, {}),
                       "ProcessGroupOptions::spin must be between 0 and 1000000 us, not ");
}

TEST(JobEnvironment, Slurm) {
  auto job = internal::parse_job_environment(kSlurm);
  EXPECT_EQ(job.launcher, Launcher::kSlurm);
  EXPECT_EQ(job.rank, 5);
  EXPECT_EQ(job.world_size, 6);
  EXPECT_EQ(job.local_rank, 2);
  EXPECT_EQ(job.store_host, "10.0.0.7");
  EXPECT_EQ(job.store_port, 49152 + 70000 % 16384);
  EXPECT_EQ(job.name, "70000.0");
  EXPECT_EQ(internal::parse_job_environment(with(kSlurm, "MASTER_PORT", "1234")).store_port, 1234);
  const auto no_address = without(kSlurm, "SLURM_LAUNCH_NODE_IPADDR");
  EXPECT_EQ(internal::parse_job_environment(with(no_address, "SLURM_JOB_NODELIST", "gpu[07-09,12]")).store_host, "gpu07");
  EXPECT_THROWS_WITH(internal::parse_job_environment(no_address), "SLURM_LAUNCH_NODE_IPADDR is set, but SLURM_PROCID=5 is");
  // srun may have been called on a node that is none of the job's.
  EXPECT_EQ(internal::parse_job_environment(with(kSlurm, "SLURM_STEP_NODELIST", "gpu[07-09,12]")).store_host, "gpu07");
  EXPECT_THROWS_WITH(internal::parse_job_environment(without(kSlurm, "SLURM_JOB_ID")),
                     "environment variable SLURM_JOB_ID is not set, but SLURM_PROCID=5 is");
  // The batch script of a job is not one of its tasks.
  EXPECT_EQ(internal::parse_job_environment(without(kSlurm, "SLURM_STEP_ID")).launcher, Launcher::kNone);
  // The shell of an salloc, which is a step of its own.
  auto shell = with(with(kSlurm, "SLURM_PROCID", "0"), "SLURM_STEP_NUM_TASKS", "1");
  EXPECT_EQ(internal::parse_job_environment(shell).world_size, 1);
  // torchrun inside a Slurm task.
  auto both = kSlurm;
  both.insert(kTorchrun.begin(), kTorchrun.end());
  EXPECT_EQ(internal::parse_job_environment(both).launcher, Launcher::kTorchrun);
}

TEST(JobEnvironment, StepsOfASlurmJobHavePortsAndNamesOfTheirOwn) {
  std::set<int> ports;
  std::set<std::string> names;
  for (const std::string job_id : {"70000", "70001", "70002"}) {
    for (const std::string step : {"0", "1", "2", "3"}) {
      const auto job = internal::parse_job_environment(with(with(kSlurm, "SLURM_JOB_ID", job_id), "SLURM_STEP_ID", step));
      EXPECT_GE(job.store_port, 49152);
      EXPECT_LT(job.store_port, 65536);
      ports.insert(job.store_port);
      names.insert(job.name);
    }
  }
  EXPECT_EQ(ports.size(), 12U);
  EXPECT_EQ(names.size(), 12U);
}

TEST(JobEnvironment, SlurmNumbersOfFederationsAndOfSpecialStepsAreBeyondAnInt) {
  const auto job =
      internal::parse_job_environment(with(with(kSlurm, "SLURM_JOB_ID", "2214592514"), "SLURM_STEP_ID", "4294967290"));
  EXPECT_EQ(job.name, "2214592514.4294967290");
  EXPECT_GE(job.store_port, 49152);
  EXPECT_LT(job.store_port, 65536);
}

TEST(JobEnvironment, AStoreOfTheProgramComesWithThePlaceInTheJob) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto job = internal::place_in_own_store({store, 2, 3}, {{"RANK", "0"}, {"WORLD_SIZE", "1"}});
  EXPECT_EQ(job.rank, 2);
  EXPECT_EQ(job.world_size, 3);
  EXPECT_EQ(job.local_rank, 2);
  EXPECT_EQ(internal::place_in_own_store({store, 2, 3}, {{"LOCAL_RANK", "0"}}).local_rank, 0);
  EXPECT_EQ(internal::place_in_own_store({store, 2, 3}, {{"OMPI_COMM_WORLD_LOCAL_RANK", "1"}}).local_rank, 1);
  EXPECT_EQ(internal::place_in_own_store({store, 2, 3}, {{"SLURM_LOCALID", "1"}, {"LOCAL_RANK", "0"}}).local_rank, 0);
  const std::string own = "init_process_group: ProcessGroupOptions::own_store has ";
  EXPECT_THROWS_WITH(internal::place_in_own_store({nullptr, 0, 1}, {}), own + "no store");
  EXPECT_THROWS_WITH(internal::place_in_own_store({store, 0, 0}, {}), own + "world_size 0, which must be at least 1");
  EXPECT_THROWS_WITH(internal::place_in_own_store({store, 3, 3}, {}), own + "rank 3, which is not in [0, 3)");
  EXPECT_THROWS_WITH(internal::place_in_own_store({store, -1, 3}, {}), own + "rank -1, which is not in [0, 3)");
}

TEST(JobEnvironment, SlurmNodeLists) {
  EXPECT_EQ(internal::first_slurm_host("login"), "login");
  EXPECT_EQ(internal::first_slurm_host("a,b"), "a");
  EXPECT_EQ(internal::first_slurm_host("node[03-05,9],login"), "node03");
  EXPECT_EQ(internal::first_slurm_host("node[7]"), "node7");
  EXPECT_EQ(internal::first_slurm_host("node[7-8]-ib,other"), "node7-ib");
  EXPECT_EQ(internal::first_slurm_host("rack[2,4]node[03-05],other"), "rack2node03");
  EXPECT_EQ(internal::first_slurm_host("login,node[1-2]"), "login");
  EXPECT_THROWS_WITH(internal::first_slurm_host("node["), "cannot read the Slurm node list node[");
}

} // namespace
} // namespace tessera::job_environment_test
