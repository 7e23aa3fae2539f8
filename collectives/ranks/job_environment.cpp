#include <tessera/collectives/ranks/job_environment.h>

#include <c10/util/Exception.h>

#include <unistd.h>
#include <charconv>
#include <cstdint>
#include <limits>
#include <optional>
#include <sstream>

namespace tessera::internal {

namespace {

class Variables {
 public:
  explicit Variables(const EnvironmentMap& map) : map_(map) {}

  std::optional<std::string> text(const std::string& name) const {
    const auto found = map_.find(name);
    if (found == map_.end() || found->second.empty()) return std::nullopt;
    return found->second;
  }

  template <typename T = int>
  std::optional<T> integer(const std::string& name) const {
    const auto value = text(name);
    if (!value) return std::nullopt;
    T number = 0;
    const auto [end, error] = std::from_chars(value->data(), value->data() + value->size(), number);
    TORCH_CHECK(error == std::errc() && end == value->data() + value->size() && number >= 0, "environment variable ", name, "=",
                *value, " is not an integer between 0 and ", std::numeric_limits<T>::max());
    return number;
  }

  template <typename T = int>
  T required_integer(const std::string& name, const std::string& because) const {
    const auto value = integer<T>(name);
    TORCH_CHECK(value, "environment variable ", name, " is not set, but ", because, " is");
    return *value;
  }

  /// The name and value of the variable, for messages.
  std::string show(const std::string& name) const { return name + "=" + text(name).value_or(""); }

 private:
  const EnvironmentMap& map_;
};

void check_below(const Variables& variables, int value, const char* name, int limit, const char* limit_name) {
  TORCH_CHECK(limit > 0, "environment variable ", variables.show(limit_name), " must be at least 1");
  TORCH_CHECK(value < limit, "environment variable ", variables.show(name), " must be less than ", variables.show(limit_name));
}

int port_of(const Variables& variables, const std::string& because) {
  const int port = variables.required_integer("MASTER_PORT", because);
  TORCH_CHECK(port >= 1 && port <= 65535, "environment variable ", variables.show("MASTER_PORT"), " is not a port (1 to 65535)");
  return port;
}

JobEnvironment parse_torchrun(const Variables& variables) {
  JobEnvironment job;
  job.launcher = variables.text(kPipeVariable) ? JobEnvironment::Launcher::kTessera : JobEnvironment::Launcher::kTorchrun;
  const char* known = variables.text("RANK") ? "RANK" : "WORLD_SIZE";
  job.rank = variables.required_integer("RANK", variables.show(known));
  job.world_size = variables.required_integer("WORLD_SIZE", variables.show(known));
  check_below(variables, job.rank, "RANK", job.world_size, "WORLD_SIZE");
  job.local_rank = variables.integer("LOCAL_RANK").value_or(job.rank);
  if (const auto local_size = variables.integer("LOCAL_WORLD_SIZE")) {
    check_below(variables, job.local_rank, "LOCAL_RANK", *local_size, "LOCAL_WORLD_SIZE");
    TORCH_CHECK(*local_size <= job.world_size, "environment variable ", variables.show("LOCAL_WORLD_SIZE"), " exceeds ",
                variables.show("WORLD_SIZE"));
    job.is_on_one_host = *local_size == job.world_size;
  }
  if (job.world_size == 1 && !variables.text("MASTER_ADDR")) return job;
  const auto host = variables.text("MASTER_ADDR");
  TORCH_CHECK(host, "environment variable MASTER_ADDR is not set, but ", variables.show("WORLD_SIZE"), " is");
  job.store_host = *host;
  job.store_port = port_of(variables, variables.show("WORLD_SIZE"));
  job.store_is_hosted = variables.text("TORCHELASTIC_USE_AGENT_STORE") == "True";
  job.restart = variables.integer("TORCHELASTIC_RESTART_COUNT").value_or(0);
  return job;
}

// What this process is among the ranks of a launcher that says so in variables of these names.
JobEnvironment parse_rank(const Variables& variables, JobEnvironment::Launcher launcher, const char* rank, const char* world_size,
                          const char* local_rank) {
  const auto known = variables.show(rank);
  JobEnvironment job;
  job.launcher = launcher;
  job.rank = variables.required_integer(rank, known);
  job.world_size = variables.required_integer(world_size, known);
  check_below(variables, job.rank, rank, job.world_size, world_size);
  job.local_rank = variables.required_integer(local_rank, known);
  return job;
}

JobEnvironment parse_open_mpi(const Variables& variables) {
  auto job = parse_rank(variables, JobEnvironment::Launcher::kOpenMpi, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                        "OMPI_COMM_WORLD_LOCAL_RANK");
  if (job.world_size == 1) return job;
  const auto local_size = variables.integer("OMPI_COMM_WORLD_LOCAL_SIZE").value_or(job.world_size);
  const auto host = variables.text("MASTER_ADDR");
  TORCH_CHECK(host || local_size == job.world_size, "environment variable MASTER_ADDR is not set, but ",
              variables.show("OMPI_COMM_WORLD_LOCAL_SIZE"), " of ", variables.show("OMPI_COMM_WORLD_SIZE"),
              " ranks are on this host; start with mpirun -x MASTER_ADDR=<host of rank 0>");
  job.store_host = host.value_or("127.0.0.1");
  job.is_on_one_host = local_size == job.world_size;
  job.store_port = port_of(variables, variables.show("OMPI_COMM_WORLD_RANK"));
  return job;
}

std::string slurm_host(const Variables& variables) {
  if (const auto host = variables.text("MASTER_ADDR")) return *host;
  for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"})
    if (const auto list = variables.text(name)) return first_slurm_host(*list);
  if (const auto host = variables.text("SLURM_LAUNCH_NODE_IPADDR")) return *host; // where srun runs: perhaps no node of the job
  TORCH_CHECK(false,
              "none of the environment variables MASTER_ADDR, SLURM_STEP_NODELIST, SLURM_JOB_NODELIST and "
              "SLURM_LAUNCH_NODE_IPADDR is set, but ",
              variables.show("SLURM_PROCID"), " is");
}

// The steps of a job run at the same time, on the same hosts.
int slurm_port(const Variables& variables, const std::string& because) {
  constexpr int64_t kFirstDynamicPort = 49152, kPorts = 65536 - kFirstDynamicPort;
  constexpr int64_t kBetweenSteps = 1009; // a prime, so that the next steps meet no port of the next jobs
  const auto job = variables.required_integer<int64_t>("SLURM_JOB_ID", because);
  const auto step = variables.required_integer<int64_t>("SLURM_STEP_ID", because);
  return static_cast<int>(kFirstDynamicPort + (job % kPorts + step % kPorts * kBetweenSteps) % kPorts);
}

JobEnvironment parse_slurm(const Variables& variables) {
  // Inside a step SLURM_NTASKS may be the job's: the shell of an salloc is a step of one task.
  const char* const tasks = variables.text("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
  auto job = parse_rank(variables, JobEnvironment::Launcher::kSlurm, "SLURM_PROCID", tasks, "SLURM_LOCALID");
  if (job.world_size == 1) return job;
  job.store_host = slurm_host(variables);
  const auto known = variables.show("SLURM_PROCID");
  job.store_port = variables.text("MASTER_PORT") ? port_of(variables, known) : slurm_port(variables, known);
  job.name = variables.text("SLURM_JOB_ID").value_or("") + "." + variables.text("SLURM_STEP_ID").value_or("");
  job.restart = variables.integer("SLURM_RESTART_COUNT").value_or(0);
  return job;
}

} // namespace

std::string first_slurm_host(const std::string& node_list) {
  const auto bracket = node_list.find('['), comma = node_list.find(',');
  if (bracket == std::string::npos || comma < bracket) return node_list.substr(0, comma);
  const auto first_end = node_list.find_first_of("-,]", bracket), close = node_list.find(']', bracket);
  TORCH_CHECK(close != std::string::npos && first_end > bracket + 1, "cannot read the Slurm node list ", node_list);
  const auto rest = node_list.substr(close + 1); // perhaps with brackets too: rack[1-2]node[1-4]
  return node_list.substr(0, bracket) + node_list.substr(bracket + 1, first_end - bracket - 1) + first_slurm_host(rest);
}

JobEnvironment parse_job_environment(const EnvironmentMap& environment) {
  const Variables variables(environment);
  if (variables.text("RANK") || variables.text("WORLD_SIZE")) return parse_torchrun(variables);
  if (variables.text("OMPI_COMM_WORLD_RANK")) return parse_open_mpi(variables);
  // Without a step, as in the batch script itself, the process is no task of srun.
  if (variables.text("SLURM_PROCID") && variables.text("SLURM_STEP_ID")) return parse_slurm(variables);
  return {};
}

namespace {

constexpr std::chrono::microseconds kLongestSpin = std::chrono::seconds(1);

int64_t duration_or(int64_t otherwise, const std::string& name, const char* unit, int64_t least, int64_t most,
                    const EnvironmentMap& environment) {
  const auto value = Variables(environment).text(name);
  if (!value) return otherwise;
  std::istringstream text(*value); // which takes blanks around the number
  int64_t count = 0;
  const bool is_whole = (text >> count) && (text >> std::ws).eof();
  TORCH_CHECK(is_whole && count >= least && count <= most, "environment variable ", name, "=", *value,
              " is not a whole number of ", unit, " between ", least, " and ", most);
  return count;
}

int seconds_or(int otherwise, const std::string& name, int least, const EnvironmentMap& environment) {
  return static_cast<int>(duration_or(otherwise, name, "seconds", least, kLongestTimeout.count(), environment));
}

} // namespace

int timeout_seconds_or(int otherwise, const EnvironmentMap& environment) {
  return seconds_or(otherwise, "TESSERA_TIMEOUT_SECONDS", 1, environment);
}

int grace_seconds_or(int otherwise, const EnvironmentMap& environment) {
  return seconds_or(otherwise, "TESSERA_GRACE_SECONDS", 0, environment);
}

ProcessGroupOptions with_overrides(ProcessGroupOptions options, const EnvironmentMap& environment) {
  const Variables variables(environment);
  if (const int seconds = timeout_seconds_or(0, environment); seconds > 0) options.timeout = std::chrono::seconds(seconds);
  TORCH_CHECK(options.timeout.count() > 0 && options.timeout <= kLongestTimeout,
              "the process group's timeout must be positive and at most ", kLongestTimeout.count(), " s, not ",
              options.timeout.count(), " ms");
  if (const auto value = variables.text("TESSERA_CHECK_COLLECTIVES")) {
    TORCH_CHECK(*value == "0" || *value == "1", "environment variable TESSERA_CHECK_COLLECTIVES=", *value, " must be 0 or 1");
    options.check_collectives = *value == "1";
  }
  if (const auto name = variables.text("TESSERA_TRANSPORT")) {
    TORCH_CHECK(*name == "automatic" || *name == "shared_memory" || *name == "gloo",
                "environment variable TESSERA_TRANSPORT=", *name, " must be automatic, shared_memory or gloo");
    options.transport = *name == "gloo"        ? Transport::kGloo
                        : *name == "automatic" ? Transport::kAutomatic
                                               : Transport::kSharedMemory;
  }
  options.spin = std::chrono::microseconds(
      duration_or(options.spin.count(), "TESSERA_SPIN_MICROSECONDS", "microseconds", 0, kLongestSpin.count(), environment));
  TORCH_CHECK_VALUE(options.spin.count() >= 0 && options.spin <= kLongestSpin, "ProcessGroupOptions::spin must be between 0 and ",
                    kLongestSpin.count(), " us, not ", options.spin.count());
  return options;
}

JobEnvironment place_in_own_store(const OwnStore& own, const EnvironmentMap& environment) {
  constexpr const char* kCall = "init_process_group: ProcessGroupOptions::own_store";
  TORCH_CHECK_VALUE(own.store, kCall, " has no store");
  TORCH_CHECK_VALUE(own.world_size >= 1, kCall, " has world_size ", own.world_size, ", which must be at least 1");
  TORCH_CHECK_VALUE(own.rank >= 0 && own.rank < own.world_size, kCall, " has rank ", own.rank, ", which is not in [0, ",
                    own.world_size, ")");
  JobEnvironment job;
  job.rank = own.rank;
  job.world_size = own.world_size;
  const Variables variables(environment);
  job.local_rank = own.rank;
  for (const char* name : {"SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "LOCAL_RANK"}) {
    if (const auto local = variables.integer(name)) job.local_rank = static_cast<int>(*local);
  }
  return job;
}

bool checks_collectives_over_nccl(const EnvironmentMap& environment) {
  return Variables(environment).text("TESSERA_CHECK_COLLECTIVES") == "1";
}

EnvironmentMap current_environment() {
  EnvironmentMap map;
  for (char** entry = environ; entry && *entry; ++entry) {
    const std::string text(*entry);
    if (const auto equals = text.find('='); equals != std::string::npos) map[text.substr(0, equals)] = text.substr(equals + 1);
  }
  return map;
}

} // namespace tessera::internal
