#include <tessera/collectives/process_context.h>

#include <tessera/collectives/backend.h>
#include <tessera/collectives/error_text.h>
#include <tessera/collectives/fake.h>
#include <tessera/collectives/group_store.h>
#include <tessera/collectives/job_environment.h>
#include <tessera/collectives/job_trace.h>
#include <tessera/collectives/nccl/plugin.h>
#include <tessera/collectives/rank_watch.h>
#include <tessera/collectives/recording_communicator.h>
#include <tessera/collectives/signal_watch.h>
#include <tessera/collectives/single_rank.h>
#include <tessera/collectives/store_socket.h>
#include <tessera/collectives/time_limit.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <unistd.h>
#include <algorithm>
#include <csignal>
#include <fstream>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
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

ProcessGroupOptions with_overrides(ProcessGroupOptions options, const internal::EnvironmentMap& environment) {
  const int seconds = internal::timeout_seconds_or(0, environment);
  if (seconds > 0) options.timeout = std::chrono::seconds(seconds);
  TORCH_CHECK(options.timeout.count() > 0, "the process group's timeout must be positive, not ", options.timeout.count(), " ms");
  if (const auto found = environment.find("TESSERA_CHECK_COLLECTIVES"); found != environment.end() && !found->second.empty()) {
    TORCH_CHECK(found->second == "0" || found->second == "1", "environment variable TESSERA_CHECK_COLLECTIVES=", found->second,
                " must be 0 or 1");
    options.check_collectives = found->second == "1";
  }
  if (const auto found = environment.find("TESSERA_TRANSPORT"); found != environment.end() && !found->second.empty()) {
    const auto& name = found->second;
    TORCH_CHECK(name == "automatic" || name == "shared_memory" || name == "gloo", "environment variable TESSERA_TRANSPORT=", name,
                " must be automatic, shared_memory or gloo");
    options.transport = name == "gloo"        ? Transport::kGloo
                        : name == "automatic" ? Transport::kAutomatic
                                              : Transport::kSharedMemory;
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

/// The socket of the store that this process hosts, where it need not listen at all addresses of the machine.
std::optional<int> listen_for(const internal::JobEnvironment& job) {
  const auto reach = job.is_on_one_host ? internal::StoreReach::kThisHost : internal::StoreReach::kOtherHosts;
  const auto socket = internal::listen_for_store(job.store_host, static_cast<uint16_t>(job.store_port), reach);
  if (!socket) return std::nullopt;
  return socket->descriptor;
}

c10::intrusive_ptr<c10d::Store> connect_store(const internal::JobEnvironment& job, std::chrono::milliseconds timeout) {
  if (job.store_host.empty()) return c10::make_intrusive<c10d::HashStore>();
  c10d::TCPStoreOptions options{.port = static_cast<uint16_t>(job.store_port),
                                .isServer = job.rank == 0 && !job.store_is_hosted,
                                .waitWorkers = false, // `join` waits, and says who is missing
                                .timeout = timeout};
  constexpr std::chrono::seconds kGrace(2); // the store's own timeout says more
  try {
    if (options.isServer) options.masterListenFd = listen_for(job);
    const auto store = internal::within<c10::intrusive_ptr<c10d::Store>>(
        timeout + kGrace, [host = job.store_host, options] { return c10::make_intrusive<c10d::TCPStore>(host, options); });
    if (!store)
      C10_THROW_ERROR(DistNetworkError, c10::str("timed out after ", (timeout + kGrace).count(),
                                                 " ms: nothing answers there, or what answers is no store"));
    return *store;
  } catch (const std::exception& error) {
    C10_THROW_ERROR(DistNetworkError, c10::str("init_process_group on rank ", job.rank, " of ", job.world_size, ": cannot ",
                                               options.isServer ? "open" : "reach", " the store at ", job.store_host, ":",
                                               job.store_port, ": ", internal::error_text(error)));
  }
}

std::string joined_key(int64_t rank) { return c10::str("joined/", rank); }
std::string process_key(int64_t rank) { return c10::str("process/", rank); }
std::string transport_key(int64_t rank) { return c10::str("transport/", rank); }
constexpr const char* kJobKey = "job";

std::string new_job_name() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}", random(), random());
}

/// Where the process of each rank runs, and how it wants to exchange data.
struct Places {
  std::vector<std::string> hosts, processes; ///< what `host_identity` and `RankWatch::own_process` return there
  std::vector<std::string> transports;
  std::string job; ///< a name that no other job has
};

std::vector<int64_t> absent(c10d::Store& store, const std::vector<int64_t>& ranks) {
  return internal::absent_ranks(store, ranks, joined_key);
}

// One request, whatever the number of ranks.
std::vector<std::string> values_of(c10d::Store& store, const std::vector<std::string>& keys) {
  std::vector<std::string> values;
  for (const auto& value : store.multiGet(keys)) values.emplace_back(value.begin(), value.end());
  return values;
}

const char* name_of(Transport transport) {
  switch (transport) {
    case Transport::kAutomatic: return "automatic";
    case Transport::kSharedMemory: return "shared_memory";
    case Transport::kGloo: return "gloo";
  }
  return "unknown";
}

// Ranks with different ones would wait for each other in vain.
void check_same_transport(const std::vector<std::string>& transports) {
  const auto other = std::find_if(transports.begin(), transports.end(), [&](const auto& each) { return each != transports[0]; });
  TORCH_CHECK(other == transports.end(), "init_process_group: the transport (TESSERA_TRANSPORT, ProcessGroupOptions) is ",
              transports[0], " on rank 0 and ", *other, " on rank ", other - transports.begin());
}

/// Waits for all ranks. `launch` says in its store which of them have ended before they came.
Places join(const c10::intrusive_ptr<c10d::Store>& store, const c10::intrusive_ptr<c10d::Store>& job_store,
            const internal::JobEnvironment& job, const ProcessGroupOptions& options) {
  if (job.rank == 0) store->set(kJobKey, new_job_name());
  store->set(process_key(job.rank), internal::RankWatch::own_process());
  store->set(transport_key(job.rank), name_of(options.transport));
  store->set(joined_key(job.rank), host_identity());
  std::vector<int64_t> ranks(job.world_size);
  std::iota(ranks.begin(), ranks.end(), 0);
  std::vector<std::string> keys, process_keys, transport_keys;
  for (const auto rank : ranks) {
    keys.push_back(joined_key(rank));
    process_keys.push_back(process_key(rank));
    transport_keys.push_back(transport_key(rank));
  }
  try {
    internal::wait_for_keys(store, keys, options.timeout, [store, job_store] {
      return absent(*store, internal::ended_ranks(*job_store)).empty() ? "" : "a rank has ended before it came";
    });
  } catch (const std::exception&) {
    const auto text = c10::str("init_process_group on rank ", job.rank, ": ");
    if (const auto ended = absent(*store, internal::ended_ranks(*job_store)); !ended.empty()) {
      job_store->set(internal::kMissingRankKey, internal::MissingRank{ended[0]}.encode());
      C10_THROW_ERROR(DistNetworkError, c10::str(text, "these ranks have ended before they called it: ", c10::Join(", ", ended)));
    }
    if (const auto missing = absent(*store, ranks); !missing.empty())
      C10_THROW_ERROR(DistNetworkError, c10::str(text, "timed out after ", options.timeout.count(), " ms; of ", job.world_size,
                                                 " ranks these did not come: ", c10::Join(", ", missing)));
  }
  return {values_of(*store, keys), values_of(*store, process_keys), values_of(*store, transport_keys),
          store->get_to_str(kJobKey)};
}

// A write to a connection whose peer is gone shall be an error of that collective, not the end of this process.
void ignore_broken_pipes() {
  struct sigaction action = {};
  if (sigaction(SIGPIPE, nullptr, &action) == 0 && action.sa_handler == SIG_DFL) std::signal(SIGPIPE, SIG_IGN);
}

/// The index of `own` in the ranks of a communicator.
int place_of(int64_t own, const std::vector<int64_t>& ranks, int world_size) {
  const auto list = c10::Join(", ", ranks);
  for (const auto rank : ranks)
    TORCH_CHECK(rank >= 0 && rank < world_size, "communicator of ranks [", list, "]: rank ", rank, " is not in [0, ", world_size,
                ")");
  TORCH_CHECK(std::set(ranks.begin(), ranks.end()).size() == ranks.size(), "communicator of ranks [", list,
              "]: a rank appears twice");
  const auto found = std::find(ranks.begin(), ranks.end(), own);
  TORCH_CHECK(found != ranks.end(), "communicator of ranks [", list, "]: rank ", own, " is not one of them");
  return static_cast<int>(found - ranks.begin());
}

std::shared_ptr<internal::JobTrace> make_trace(const internal::JobEnvironment& job, const Places& places,
                                               const internal::TraceOptions& options) {
  if (options.calls == 0) return nullptr;
  const auto& host = places.hosts[static_cast<size_t>(job.rank)];
  internal::TraceOwner owner{
      .job = places.job, .rank = job.rank, .world_size = job.world_size, .host = host.substr(0, host.find(' '))};
  return std::make_shared<internal::JobTrace>(std::move(owner), options);
}

} // namespace

struct ProcessContext::Communicators {
  using Key = std::tuple<std::vector<int64_t>, at::DeviceType, std::string>;

  std::vector<std::string> hosts; ///< of each rank
  std::shared_ptr<internal::RankWatch> watch;
  std::shared_ptr<internal::shared_memory::Arenas> arenas = std::make_shared<internal::shared_memory::Arenas>();
  std::shared_ptr<internal::JobTrace> trace;           ///< null where nothing is recorded
  std::unique_ptr<internal::SignalWatch> signal_watch; ///< for which it is written
  mutable std::mutex mutex;
  std::map<Key, CommunicatorPtr> by_key;
};

CommunicatorPtr ProcessContext::communicator(const std::vector<int64_t>& ranks, at::DeviceType device_type,
                                             const std::string& purpose) {
  std::lock_guard lock(communicators_->mutex);
  auto& found = communicators_->by_key[{ranks, device_type, purpose}];
  if (found) return found;
  const int place = place_of(rank_, ranks, world_size_);
  if (ranks.size() == 1) return found = internal::make_single_rank_communicator(purpose, rank_, device_type);
  if (is_fake_) return found = internal::make_fake_communicator(purpose, ranks, place, device_type);

  internal::GroupDescription group{.name = purpose,
                                   .ranks = ranks,
                                   .rank = place,
                                   .local_rank = local_rank_,
                                   .options = options_,
                                   .watch = communicators_->watch,
                                   .arenas = communicators_->arenas};
  std::map<std::string, int> numbers;
  for (const auto rank : ranks)
    group.hosts.push_back(numbers.emplace(communicators_->hosts[rank], static_cast<int>(numbers.size())).first->second);
  group.store = c10::make_intrusive<internal::GroupStore>(
      c10::str("group/", c10::DeviceTypeName(device_type), "/", purpose, "/", c10::Join("_", ranks)), store_, ranks, group.watch);
  const auto connect = [&] { return internal::make_backend_communicator(group, device_type); };
  if (!communicators_->trace) return found = connect();
  internal::RecordedGroup recorded{
      .name = purpose, .device = c10::DeviceTypeName(device_type, true), .ranks = ranks, .rank = place};
  return found = internal::make_recorded(communicators_->trace, std::move(recorded), connect);
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
  const auto environment = internal::current_environment();
  const auto job = internal::parse_job_environment(environment);
  std::unique_ptr<ProcessContext> made(new ProcessContext);
  made->options_ = with_overrides(options, environment);
  const auto trace_options = internal::trace_options(environment);
  made->rank_ = job.rank;
  made->world_size_ = job.world_size;
  made->local_rank_ = job.local_rank;
  ignore_broken_pipes();
  leave_to_parent_in_forks();
  auto store = connect_store(job, made->options_.timeout);
  store->setTimeout(made->options_.timeout);
  // The launcher's store outlives a restart and a second `init_process_group`.
  made->store_ = c10::make_intrusive<c10d::PrefixStore>(c10::str("tessera/", job.restart, "/", generation), store);
  auto places = join(made->store_, store, job, made->options_);
  check_same_transport(places.transports);
  made->communicators_ = std::make_unique<ProcessContext::Communicators>();
  made->communicators_->watch = std::make_shared<internal::RankWatch>(job.rank, places.processes, made->store_, store);
  made->communicators_->trace = make_trace(job, places, trace_options);
  if (made->communicators_->trace && !trace_options.folder.empty())
    made->communicators_->signal_watch =
        std::make_unique<internal::SignalWatch>([trace = made->communicators_->trace] { trace->write_unasked("SIGUSR1"); });
  made->communicators_->hosts = std::move(places.hosts);
  ++generation;
  context = std::move(made);
}

void init_fake_process_group(int rank, int world_size) {
  std::lock_guard lock(context_mutex);
  TORCH_CHECK(!context, "init_fake_process_group: there is a process group already; call destroy_process_group first");
  TORCH_CHECK_VALUE(world_size >= 1, "init_fake_process_group: world_size is ", world_size, ", but must be positive");
  TORCH_CHECK_VALUE(rank >= 0 && rank < world_size, "init_fake_process_group: rank ", rank, " is not in [0, ", world_size, ")");
  std::unique_ptr<ProcessContext> made(new ProcessContext);
  made->is_fake_ = true;
  made->rank_ = rank;
  made->world_size_ = world_size;
  made->store_ = c10::make_intrusive<c10d::HashStore>();
  made->communicators_ = std::make_unique<ProcessContext::Communicators>();
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

void write_trace(const std::string& folder) {
  const auto& trace = process_context().communicators_->trace;
  TORCH_CHECK(trace, "write_trace: nothing is recorded with TESSERA_TRACE_CALLS=0, nor of a fake process group");
  TORCH_CHECK_VALUE(!folder.empty(), "write_trace: the name of the folder is empty");
  trace->write(folder, "write_trace");
}

void require_cuda() { internal::nccl::require_cuda_side(); }

bool cuda_is_available() {
  try {
    require_cuda();
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

} // namespace tessera
