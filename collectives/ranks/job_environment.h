#pragma once

#include <tessera/collectives/process_group_options.h>

#include <chrono>
#include <map>
#include <string>

namespace tessera::internal {

using EnvironmentMap = std::map<std::string, std::string>;

// What `launch` gives to a rank: the end of a pipe for its failure, and its own process id.
inline constexpr const char* kPipeVariable = "TESSERA_LAUNCH_PIPE";
inline constexpr const char* kParentVariable = "TESSERA_LAUNCH_PARENT";

/// Who this process is in the job, as its launcher says through environment variables.
struct JobEnvironment {
  enum class Launcher { kNone, kTorchrun, kSlurm, kOpenMpi, kTessera };

  Launcher launcher = Launcher::kNone;
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  std::string store_host; ///< where the store listens; empty for a job of one rank
  int store_port = 0;
  bool store_is_hosted = false; ///< the launcher runs the store, and rank 0 must not
  bool is_on_one_host = false;  ///< where the launcher says so
  int restart = 0;              ///< how often the launcher restarted the job
  std::string name;             ///< of Slurm's job and step; other launchers have no name for theirs
};

/// Reads the variables, in this order of preference:
/// - `tessera::launch` and torchrun (or any launcher that sets them by hand): RANK, WORLD_SIZE, LOCAL_RANK (default: RANK, when
///   it is not set), MASTER_ADDR, MASTER_PORT, TORCHELASTIC_USE_AGENT_STORE, TORCHELASTIC_RESTART_COUNT;
/// - Open MPI: OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_SIZE, MASTER_PORT,
///   and MASTER_ADDR where not all ranks are on this host (default 127.0.0.1);
/// - Slurm: SLURM_PROCID, SLURM_STEP_NUM_TASKS or SLURM_NTASKS, SLURM_LOCALID, inside a job step (SLURM_STEP_ID); the host from
///   MASTER_ADDR, the first host of SLURM_STEP_NODELIST or SLURM_JOB_NODELIST, or SLURM_LAUNCH_NODE_IPADDR; the port from
///   MASTER_PORT, or from SLURM_JOB_ID and SLURM_STEP_ID.
/// None of them: one rank. Throws c10::Error, naming the variable and its value, when variables are missing or contradict.
JobEnvironment parse_job_environment(const EnvironmentMap& environment);

inline constexpr std::chrono::seconds kLongestTimeout(9'999'999);

/// The value of TESSERA_TIMEOUT_SECONDS where it is set. Throws c10::Error when that is no whole number of seconds from 1
/// to `kLongestTimeout`.
int timeout_seconds_or(int otherwise, const EnvironmentMap& environment);
/// Reads TESSERA_GRACE_SECONDS in the same way, which may be 0.
int grace_seconds_or(int otherwise, const EnvironmentMap& environment);

/// The options as the environment overrides them: TESSERA_TIMEOUT_SECONDS, TESSERA_CHECK_COLLECTIVES, TESSERA_TRANSPORT and
/// TESSERA_SPIN_MICROSECONDS. Throws c10::Error, naming the variable and its value, where that is none of its values.
ProcessGroupOptions with_overrides(ProcessGroupOptions options, const EnvironmentMap& environment);

/// The place that `own` says, with the local rank that torchrun, Open MPI or Slurm says, or its rank. Throws where there is no
/// such place, or no store.
JobEnvironment place_in_own_store(const OwnStore& own, const EnvironmentMap& environment);

/// Whether NCCL's groups compare what they call: where TESSERA_CHECK_COLLECTIVES is 1, whatever the options say.
bool checks_collectives_over_nccl(const EnvironmentMap& environment);

/// This process's environment variables.
EnvironmentMap current_environment();

/// The first host of a Slurm node list: "node[03-05,9],login" is node03.
std::string first_slurm_host(const std::string& node_list);

} // namespace tessera::internal
