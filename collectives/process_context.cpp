#include <tessera/collectives/process_context.h>

#include <tessera/base/forks.h>
#include <tessera/collectives/backends/backend.h>
#include <tessera/collectives/backends/fake.h>
#include <tessera/collectives/backends/nccl/plugin.h>
#include <tessera/collectives/backends/shared_memory/memory/arenas.h>
#include <tessera/collectives/backends/simulated/clock_state.h>
#include <tessera/collectives/backends/simulated/operator_watch.h>
#include <tessera/collectives/backends/simulated/simulated_communicator.h>
#include <tessera/collectives/backends/single_rank.h>
#include <tessera/collectives/ranks/group_store.h>
#include <tessera/collectives/ranks/job_environment.h>
#include <tessera/collectives/ranks/rank_watch.h>
#include <tessera/collectives/ranks/rendezvous.h>
#include <tessera/collectives/start/join_job.h>
#include <tessera/collectives/start/standard_streams.h>
#include <tessera/collectives/start/thread_context.h>
#include <tessera/collectives/trace/job_trace.h>
#include <tessera/collectives/trace/recording_communicator.h>
#include <tessera/collectives/trace/signal_watch.h>

#include <absl/algorithm/container.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <pthread.h>
#include <csignal>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>

namespace tessera {

namespace {

std::mutex context_mutex;
std::unique_ptr<ProcessContext> context; // guarded by context_mutex when it is replaced

/// A forked child has none of the threads behind the communicators, and would wait for them at its exit.
void leave_to_parent_in_forks() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { static_cast<void>(context.release()); });
  TORCH_CHECK(registered == 0, "pthread_atfork failed with error ", registered);
}

// A write to a connection whose peer is gone shall be an error of that collective, not the end of this process. Programs that it
// starts inherit no handler, as they would SIG_IGN.
void ignore_broken_pipes() {
  struct sigaction action = {};
  if (sigaction(SIGPIPE, nullptr, &action) == 0 && action.sa_handler == SIG_DFL) std::signal(SIGPIPE, [](int) {});
}

/// The index of `own` in the ranks of a communicator.
int place_of(int64_t own, const RankList& ranks, int world_size) {
  const auto check = [&](bool holds, const auto&... problem) {
    TORCH_CHECK(holds, "communicator of ranks [", c10::Join(", ", ranks.expanded()), "]: ", problem...);
  };
  const auto [lowest, highest] = ranks.size() > 0 ? ranks.range() : std::pair(own, own);
  check(lowest >= 0 && highest < world_size, "rank ", lowest < 0 ? lowest : highest, " is not in [0, ", world_size, ")");
  check(!ranks.has_repetition(), "a rank appears twice");
  const auto place = ranks.index_of(own);
  check(place.has_value(), "rank ", own, " is not one of them");
  return static_cast<int>(*place);
}

std::shared_ptr<internal::JobTrace> make_trace(const internal::JobEnvironment& job, const internal::Places& places,
                                               const internal::TraceOptions& options) {
  if (options.calls == 0) return nullptr;
  const auto& host = places.hosts[static_cast<size_t>(job.rank)];
  internal::TraceOwner owner{
      .job = places.name, .rank = job.rank, .world_size = job.world_size, .host = host.substr(0, host.find(' '))};
  return std::make_shared<internal::JobTrace>(std::move(owner), options);
}

/// From before the ranks meet: the signal is also sent where they wait for one another then.
std::unique_ptr<internal::SignalWatch> make_signal_watch(const internal::TraceOptions& options) {
  return options.calls > 0 && !options.folder.empty() ? std::make_unique<internal::SignalWatch>() : nullptr;
}

} // namespace

struct ProcessContext::Communicators {
  using Key = std::tuple<RankList, at::DeviceType, std::string>;

  const int fork_depth = internal::fork_depth();
  internal::Places places;
  std::shared_ptr<internal::RankWatch> watch;
  std::shared_ptr<internal::shared_memory::Arenas> arenas = std::make_shared<internal::shared_memory::Arenas>();
  std::shared_ptr<internal::JobTrace> trace;               ///< null where nothing is recorded
  std::unique_ptr<internal::SignalWatch> signal_watch;     ///< for which it is written
  std::unique_ptr<internal::OperatorWatch> operator_watch; ///< of a simulated group
  mutable std::mutex mutex;
  std::map<Key, CommunicatorPtr> by_key;
};

CommunicatorPtr ProcessContext::communicator(const RankList& list, at::DeviceType device_type, const std::string& purpose) {
  TORCH_CHECK(internal::fork_depth() == communicators_->fork_depth, "communicator '", purpose,
              "': this process was forked from rank ", rank_, " and has no part in its job; it may join one of its own");
  std::lock_guard lock(communicators_->mutex);
  auto& by_key = communicators_->by_key;
  const Communicators::Key key{list, device_type, purpose};
  if (const auto found = by_key.find(key); found != by_key.end()) return found->second;
  const int place = place_of(rank_, list, world_size_);
  const auto made = list.size() == 1 ? internal::make_single_rank_communicator(purpose, rank_, device_type)
                    : connect_       ? connect_(purpose, list, place, device_type)
                                     : connect_processes(list, place, device_type, purpose);
  return by_key[key] = made;
}

CommunicatorPtr ProcessContext::connect_processes(const RankList& list, int place, at::DeviceType device_type,
                                                  const std::string& purpose) {
  const auto& ranks = list.expanded();
  internal::GroupDescription group{.name = purpose,
                                   .ranks = ranks,
                                   .rank = place,
                                   .local_rank = local_rank_,
                                   .options = options_,
                                   .watch = communicators_->watch,
                                   .arenas = communicators_->arenas};
  group.hosts = communicators_->places.hosts_of(ranks);
  group.store = c10::make_intrusive<internal::GroupStore>(
      c10::str("group/", c10::DeviceTypeName(device_type), "/", purpose, "/", c10::Join("_", ranks)), store_, ranks, group.watch);
  const auto connect = [&] { return internal::make_backend_communicator(group, device_type); };
  if (!communicators_->trace) return connect();
  internal::RecordedGroup recorded{
      .name = purpose, .device = c10::DeviceTypeName(device_type, true), .ranks = ranks, .rank = place};
  return internal::make_recorded(communicators_->trace, std::move(recorded), connect);
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
  TORCH_CHECK(!is_initialized(), "init_process_group was called already; call destroy_process_group first");
  internal::open_standard_streams();
  const auto environment = internal::current_environment();
  const auto job = options.own_store ? internal::place_in_own_store(*options.own_store, environment)
                                     : internal::parse_job_environment(environment);
  std::unique_ptr<ProcessContext> made(new ProcessContext);
  made->options_ = internal::with_overrides(options, environment);
  const auto trace_options = internal::trace_options(environment);
  made->rank_ = job.rank;
  made->world_size_ = job.world_size;
  made->local_rank_ = job.local_rank;
  ignore_broken_pipes();
  leave_to_parent_in_forks();
  made->communicators_ = std::make_unique<ProcessContext::Communicators>();
  auto& communicators = *made->communicators_;
  communicators.signal_watch = make_signal_watch(trace_options);
  auto [store, job_store, places, times] = internal::join_job(job, made->options_);
  made->options_.own_store.reset(); // nothing of this job keeps the program's store open
  made->store_ = std::move(store);
  made->local_world_size_ = static_cast<int>(absl::c_count(places.hosts, places.hosts[static_cast<size_t>(job.rank)]));
  communicators.watch = std::make_shared<internal::RankWatch>(job.rank, places.processes, made->store_, job_store);
  communicators.trace = make_trace(job, places, trace_options);
  if (communicators.signal_watch)
    communicators.signal_watch->start([trace = communicators.trace] { trace->write_unasked("SIGUSR1"); });
  communicators.places = std::move(places);
  context = std::move(made);
  ++times; // a rank that fails before meets the others where they are when it tries again
}

ProcessContext::ProcessContext(int rank, int world_size, Connect connect)
    : rank_(rank),
      world_size_(world_size),
      store_(c10::make_intrusive<c10d::HashStore>()),
      connect_(std::move(connect)),
      communicators_(std::make_unique<Communicators>()) {}

namespace {

/// The context of the calling thread, if it is a rank of its own, and otherwise the process's.
ProcessContext* current_context() {
  auto* const own = internal::thread_context();
  return own ? own : context.get();
}

void check_pretended(const char* call, int rank, int64_t world_size) {
  TORCH_CHECK(!is_initialized(), call, ": there is a process group already; call destroy_process_group first");
  TORCH_CHECK_VALUE(world_size >= 1, call, ": world_size is ", world_size, ", but must be positive");
  TORCH_CHECK_VALUE(rank >= 0 && rank < world_size, call, ": rank ", rank, " is not in [0, ", world_size, ")");
}

} // namespace

void init_fake_process_group(int rank, int world_size) {
  std::lock_guard lock(context_mutex);
  check_pretended("init_fake_process_group", rank, world_size);
  context.reset(new ProcessContext(rank, world_size, internal::make_fake_communicator));
  context->is_pretended_ = true;
}

namespace {

void count_operator(const internal::OperatorWork& work) {
  auto* const current = current_context();
  if (auto* const clock = current ? current->simulated_clock() : nullptr) clock->state().count_operator(work);
}

} // namespace

std::unique_ptr<ProcessContext> internal::make_simulated_context(const Topology& topology, int rank,
                                                                 const SimulationOptions& options) {
  const auto clock = std::make_shared<SimulatedClock>(topology, options);
  const auto connect = [clock](std::string name, RankList ranks, int place, at::DeviceType device_type) {
    auto fake = internal::make_fake_communicator(std::move(name), std::move(ranks), place, device_type);
    return internal::make_simulated_communicator(std::move(fake), clock);
  };
  std::unique_ptr<ProcessContext> made(new ProcessContext(rank, static_cast<int>(topology.ranks), connect));
  made->is_pretended_ = true;
  made->clock_ = clock;
  if (options.flops_per_second) {
    const bool counts_bytes = options.bytes_per_second.has_value();
    made->communicators_->operator_watch = std::make_unique<internal::OperatorWatch>(count_operator, counts_bytes);
  }
  return made;
}

void init_simulated_process_group(const Topology& topology, int rank, const SimulationOptions& options) {
  std::lock_guard lock(context_mutex);
  topology.check();
  check_pretended("init_simulated_process_group", rank, topology.ranks);
  context = internal::make_simulated_context(topology, rank, options);
}

SimulatedClock& simulated_clock() {
  auto* const clock = process_context().simulated_clock();
  TORCH_CHECK(clock, "simulated_clock: the process group is no simulated one: call init_simulated_process_group");
  return *clock;
}

bool is_initialized() { return current_context() != nullptr; }

ProcessContext& process_context() {
  auto* const current = current_context();
  TORCH_CHECK(current, "no process group: call tessera::init_process_group() first");
  return *current;
}

int internal::rank_for_errors() { return is_initialized() ? process_context().rank() : 0; }

void destroy_process_group() {
  TORCH_CHECK(!internal::thread_context(), "destroy_process_group: that of ranks in threads ends with run_ranks_as_threads");
  std::lock_guard lock(context_mutex);
  TORCH_CHECK(context, "no process group: call tessera::init_process_group() first");
  context.reset();
}

void write_trace(const std::string& folder) {
  const auto& trace = process_context().communicators_->trace;
  TORCH_CHECK(trace,
              "write_trace: nothing is recorded with TESSERA_TRACE_CALLS=0, of a fake or simulated process group, or "
              "of ranks in threads");
  TORCH_CHECK_VALUE(!folder.empty(), "write_trace: the name of the folder is empty");
  trace->write(folder, "write_trace");
}

void require_cuda() { internal::nccl::require_cuda_side(); }

bool cuda_is_available() {
  internal::nccl::check_settings();
  try {
    require_cuda();
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

} // namespace tessera
