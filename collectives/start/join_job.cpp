#include <tessera/collectives/start/join_job.h>

#include <tessera/base/error_text.h>
#include <tessera/collectives/ranks/rank_watch.h>
#include <tessera/collectives/ranks/store_socket.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <unistd.h>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace tessera::internal {

namespace {

/// The same on all ranks, however they call its address.
std::string id_of(c10d::Store& store) {
  std::random_device random;
  return store.compareSet("tessera/store", std::string(), c10::str(random(), ".", random()));
}

/// Keeps the keys of each time apart: how often this process joined a job with this store. All ranks that do so again have been
/// in the same ones there, whatever other jobs each was in. Guarded by the caller of `join_job`, as the next is.
int& times_joined(const JobEnvironment& job, c10d::Store& store) {
  static auto* const times = new std::map<std::string, int>;
  return (*times)[c10::str(id_of(store), "/", job.name, "/", job.restart)];
}

/// The socket of the store that this process hosts, where it need not listen at all addresses of the machine.
std::optional<int> listen_for(const JobEnvironment& job) {
  const auto reach = job.is_on_one_host ? StoreReach::kThisHost : StoreReach::kOtherHosts;
  const auto socket = listen_for_store(job.store_host, static_cast<uint16_t>(job.store_port), reach);
  if (!socket) return std::nullopt;
  return socket->descriptor;
}

bool hosts_store(const JobEnvironment& job) { return !job.store_host.empty() && job.rank == 0 && !job.store_is_hosted; }

/// The store of a job that this process hosted, by process (a forked child has no part in it) and port. It stays until the
/// process ends: ranks that join a second job may come before this one has left the first, or while something of that lives.
c10::intrusive_ptr<c10d::Store>& hosted_store(int64_t port) {
  static auto* const stores = new std::map<std::pair<pid_t, int64_t>, c10::intrusive_ptr<c10d::Store>>;
  return (*stores)[{getpid(), port}];
}

/// Names the store as errors do.
std::string name_of_store(const JobEnvironment& job, const ProcessGroupOptions& options) {
  if (options.own_store) return "the store that the program gave";
  return c10::str("the store at ", job.store_host, ":", job.store_port);
}

/// What to do where this rank cannot open the store.
std::string remedy_for(const std::string& failure) {
  const auto says = [&](const char* text) { return failure.find(text) != std::string::npos; };
  if (!says("EADDRINUSE") && !says(std::strerror(EADDRINUSE))) return "";
  return ". Choose a MASTER_PORT that no other program has. A store that the program itself has there already is for "
         "ProcessGroupOptions::own_store; or set TORCHELASTIC_USE_AGENT_STORE=True for all ranks, which then only connect to it";
}

/// A connection that nobody else waits on, or changes the timeout of.
c10::intrusive_ptr<c10d::Store> open_or_reach(const JobEnvironment& job, const ProcessGroupOptions& options) {
  if (options.own_store) return connect_within(options.timeout, [store = options.own_store->store] { return store->clone(); });
  c10d::TCPStoreOptions tcp{.port = static_cast<uint16_t>(job.store_port),
                            .isServer = hosts_store(job),
                            .waitWorkers = false, // `meet_all` waits, and says who is missing
                            .timeout = options.timeout};
  if (tcp.isServer) tcp.masterListenFd = listen_for(job);
  return connect_within(options.timeout, [host = job.store_host, tcp] { return c10::make_intrusive<c10d::TCPStore>(host, tcp); });
}

c10::intrusive_ptr<c10d::Store> connect_store(const JobEnvironment& job, const ProcessGroupOptions& options) try {
  if (!options.own_store && job.store_host.empty()) return c10::make_intrusive<c10d::HashStore>();
  if (hosts_store(job) && hosted_store(job.store_port)) return hosted_store(job.store_port);
  return open_or_reach(job, options);
} catch (const std::exception& error) {
  const auto failure = error_text(error);
  C10_THROW_ERROR(DistNetworkError, c10::str("init_process_group on rank ", job.rank, " of ", job.world_size, ": cannot ",
                                             hosts_store(job) ? "open " : "reach ", name_of_store(job, options), ": ", failure,
                                             hosts_store(job) ? remedy_for(failure) : ""));
}

/// Waits for all ranks. `launch` says in its store which of them have ended before they came.
Places meet_all(const c10::intrusive_ptr<c10d::Store>& store, const c10::intrusive_ptr<c10d::Store>& job_store,
                const JobEnvironment& job, const ProcessGroupOptions& options) {
  std::vector<int64_t> ranks(job.world_size);
  std::iota(ranks.begin(), ranks.end(), 0);
  const auto name_ended = [store, job_store]() -> std::string {
    const auto ended = absent_from(*store, ended_ranks(*job_store));
    if (ended.empty()) return "";
    job_store->set(kMissingRankKey, MissingRank{ended[0]}.encode());
    return c10::str("these ranks have ended before they called it: ", c10::Join(", ", ended));
  };
  auto store_name = name_of_store(job, options);
  if (!options.own_store) store_name += job.store_is_hosted ? ", which the launcher hosts" : ", which rank 0 hosts";
  return meet({store, std::move(ranks), job.rank, options, "init_process_group", std::move(store_name)}, name_ended);
}

} // namespace

JoinedJob join_job(const JobEnvironment& job, const ProcessGroupOptions& options) {
  auto job_store = connect_store(job, options);
  job_store->setTimeout(options.timeout);
  // A store outlives a second `init_process_group`, and that of a launcher a restart.
  auto& times = times_joined(job, *job_store);
  const auto prefix = c10::str("tessera/", job.name.empty() ? "" : job.name + "/", job.restart, "/", times);
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::PrefixStore>(prefix, job_store);
  auto places = meet_all(store, job_store, job, options);
  if (hosts_store(job)) hosted_store(job.store_port) = job_store;
  return {store, std::move(job_store), std::move(places), times};
}

} // namespace tessera::internal
