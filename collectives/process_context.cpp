#include <tessera/collectives/process_context.h>

#include <tessera/collectives/backend.h>
#include <tessera/collectives/error_text.h>
#include <tessera/collectives/job_environment.h>
#include <tessera/collectives/nccl/plugin.h>
#include <tessera/collectives/single_rank.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <unistd.h>
#include <algorithm>
#include <csignal>
#include <fstream>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>
#include <tuple>

namespace tessera {

namespace {

std::mutex context_mutex;
std::unique_ptr<ProcessContext> context; // guarded by context_mutex when it is replaced
int generation = 0;                      // how often this process joined a job: keeps the keys of each time apart

/// A forked child has none of the threads behind the communicators, and would wait for them at its exit.
void leave_to_parent_in_forks() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { static_cast<void>(context.release()); });
  TORCH_CHECK(registered == 0, "pthread_atfork failed with error ", registered);
}

int seconds_or(const EnvironmentMap& environment, const char* name, int otherwise) {
  const auto found = environment.find(name);
  if (found == environment.end() || found->second.empty()) return otherwise;
  char* end = nullptr;
  const long value = std::strtol(found->second.c_str(), &end, 10);
  TORCH_CHECK(*end == '\0' && value > 0 && value < 10'000'000, "environment variable ", name, "=", found->second,
              " is not a positive number of seconds");
  return static_cast<int>(value);
}

ProcessGroupOptions with_overrides(ProcessGroupOptions options, const EnvironmentMap& environment) {
  const int seconds = seconds_or(environment, "TESSERA_TIMEOUT_SECONDS", 0);
  if (seconds > 0) options.timeout = std::chrono::seconds(seconds);
  TORCH_CHECK(options.timeout.count() > 0, "the process group's timeout must be positive, not ", options.timeout.count(), " ms");
  if (const auto found = environment.find("TESSERA_CHECK_COLLECTIVES"); found != environment.end() && !found->second.empty()) {
    TORCH_CHECK(found->second == "0" || found->second == "1", "environment variable TESSERA_CHECK_COLLECTIVES=", found->second,
                " must be 0 or 1");
    options.check_collectives = found->second == "1";
  }
  return options;
}

// Equal for processes that can reach each other over the loopback address. Machines may share a name, and containers a machine.
std::string host_identity() {
  std::string name(256, '\0'), boot;
  if (gethostname(name.data(), name.size() - 1) != 0) name = "unknown";
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return c10::str(name.c_str(), " ", boot);
}

/// What `connect` returns, unless that takes longer than `timeout`: its thread is then left behind. TCPStore has no time limit
/// for a process that accepts the connection and never answers.
c10::intrusive_ptr<c10d::Store> within(std::chrono::milliseconds timeout,
                                       std::function<c10::intrusive_ptr<c10d::Store>()> connect) {
  std::packaged_task<c10::intrusive_ptr<c10d::Store>()> task(std::move(connect));
  auto store = task.get_future();
  std::thread(std::move(task)).detach();
  if (store.wait_for(timeout) == std::future_status::timeout)
    C10_THROW_ERROR(DistNetworkError,
                    c10::str("timed out after ", timeout.count(), " ms: nothing answers there, or what answers is no store"));
  return store.get();
}

c10::intrusive_ptr<c10d::Store> connect_store(const JobEnvironment& job, std::chrono::milliseconds timeout) {
  if (job.store_host.empty()) return c10::make_intrusive<c10d::HashStore>();
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(job.store_port);
  options.isServer = job.rank == 0 && !job.store_is_hosted;
  options.waitWorkers = false; // `join` waits, and says who is missing
  options.timeout = timeout;
  constexpr std::chrono::seconds kGrace(2); // the store's own timeout says more
  try {
    return within(timeout + kGrace,
                  [host = job.store_host, options] { return c10::make_intrusive<c10d::TCPStore>(host, options); });
  } catch (const std::exception& error) {
    C10_THROW_ERROR(DistNetworkError, c10::str("init_process_group on rank ", job.rank, " of ", job.world_size, ": cannot ",
                                               options.isServer ? "open" : "reach", " the store at ", job.store_host, ":",
                                               job.store_port, ": ", error_text(error)));
  }
}

std::string joined_key(int rank) { return c10::str("joined/", rank); }

/// Waits for all ranks and returns their hosts.
std::vector<std::string> join(c10d::Store& store, const JobEnvironment& job, std::chrono::milliseconds timeout) {
  store.set(joined_key(job.rank), host_identity());
  std::vector<std::string> keys;
  for (int rank = 0; rank < job.world_size; ++rank) keys.push_back(joined_key(rank));
  std::string cause;
  try {
    store.wait(keys, timeout);
  } catch (const std::exception& error) {
    cause = error_text(error);
  }
  std::vector<int> missing;
  if (!cause.empty())
    for (int rank = 0; rank < job.world_size; ++rank)
      if (!store.check({keys[rank]})) missing.push_back(rank);
  if (!missing.empty())
    C10_THROW_ERROR(DistNetworkError,
                    c10::str("init_process_group on rank ", job.rank, ": timed out after ", timeout.count(), " ms; of ",
                             job.world_size, " ranks these did not come: ", c10::Join(", ", missing)));
  std::vector<std::string> hosts;
  for (const auto& key : keys) hosts.push_back(store.get_to_str(key));
  return hosts;
}

// A write to a connection whose peer is gone shall be an error of that collective, not the end of this process.
void ignore_broken_pipes() {
  struct sigaction action = {};
  if (sigaction(SIGPIPE, nullptr, &action) == 0 && action.sa_handler == SIG_DFL) std::signal(SIGPIPE, SIG_IGN);
}

} // namespace

struct ProcessContext::Communicators {
  using Key = std::tuple<std::vector<int64_t>, at::DeviceType, std::string>;

  std::vector<std::string> hosts; ///< of each rank
  mutable std::mutex mutex;
  std::map<Key, CommunicatorPtr> by_key;
};

c10::intrusive_ptr<c10d::Store> ProcessContext::store() const { return store_; }

CommunicatorPtr ProcessContext::communicator(const std::vector<int64_t>& ranks, at::DeviceType device_type,
                                             const std::string& purpose) {
  std::lock_guard lock(communicators_->mutex);
  auto& found = communicators_->by_key[{ranks, device_type, purpose}];
  if (found) return found;
  const auto list = c10::Join(", ", ranks);
  for (const auto rank : ranks)
    TORCH_CHECK(rank >= 0 && rank < world_size_, "communicator of ranks [", list, "]: rank ", rank, " is not in [0, ",
                world_size_, ")");
  TORCH_CHECK(std::set(ranks.begin(), ranks.end()).size() == ranks.size(), "communicator of ranks [", list,
              "]: a rank appears twice");
  const auto own = std::find(ranks.begin(), ranks.end(), rank_);
  TORCH_CHECK(own != ranks.end(), "communicator of ranks [", list, "]: rank ", rank_, " is not one of them");
  if (ranks.size() == 1) return found = make_single_rank_communicator(purpose, rank_, device_type);

  const auto& hosts = communicators_->hosts;
  GroupDescription group;
  group.name = purpose;
  group.ranks = ranks;
  group.rank = static_cast<int>(own - ranks.begin());
  group.local_rank = local_rank_;
  group.all_local = std::all_of(ranks.begin(), ranks.end(), [&](auto rank) { return hosts[rank] == hosts[ranks[0]]; });
  group.options = options_;
  group.store = c10::make_intrusive<c10d::PrefixStore>(
      c10::str("group/", c10::DeviceTypeName(device_type), "/", purpose, "/", c10::Join("_", ranks)), store_);
  return found = make_backend_communicator(group, device_type);
}

CollectiveCounters::Count ProcessContext::count(CollectiveKind kind) const {
  std::lock_guard lock(communicators_->mutex);
  CollectiveCounters::Count sum;
  for (const auto& [key, communicator] : communicators_->by_key) {
    const auto count = communicator->counters().get(kind);
    sum.calls += count.calls;
    sum.bytes += count.bytes;
  }
  return sum;
}

void ProcessContext::reset_counters() {
  std::lock_guard lock(communicators_->mutex);
  for (const auto& [key, communicator] : communicators_->by_key) communicator->counters().reset();
}

ProcessContext::~ProcessContext() = default;

void init_process_group(const ProcessGroupOptions& options) {
  std::lock_guard lock(context_mutex);
  TORCH_CHECK(!context, "init_process_group was called already; call destroy_process_group first");
  const auto environment = current_environment();
  const auto job = parse_job_environment(environment);
  std::unique_ptr<ProcessContext> made(new ProcessContext);
  made->options_ = with_overrides(options, environment);
  made->rank_ = job.rank;
  made->world_size_ = job.world_size;
  made->local_rank_ = job.local_rank;
  ignore_broken_pipes();
  leave_to_parent_in_forks();
  auto store = connect_store(job, made->options_.timeout);
  store->setTimeout(made->options_.timeout);
  // The launcher's store outlives a restart and a second `init_process_group`.
  made->store_ = c10::make_intrusive<c10d::PrefixStore>(c10::str("tessera/", job.restart, "/", generation), std::move(store));
  made->communicators_ = std::make_unique<ProcessContext::Communicators>();
  made->communicators_->hosts = join(*made->store_, job, made->options_.timeout);
  ++generation;
  context = std::move(made);
}

bool is_initialized() { return context != nullptr; }

ProcessContext& process_context() {
  TORCH_CHECK(context, "no process group: call tessera::init_process_group() first");
  return *context;
}

void destroy_process_group() {
  std::lock_guard lock(context_mutex);
  TORCH_CHECK(context, "no process group: call tessera::init_process_group() first");
  context.reset();
}

bool cuda_is_available() {
  try {
    nccl::require_cuda();
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

} // namespace tessera
