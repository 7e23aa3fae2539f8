#include <tessera/collectives/backends/backend.h>

#include <tessera/base/error_text.h>
#include <tessera/collectives/backends/gloo/gloo_communicator.h>
#include <tessera/collectives/backends/hierarchical/connect.h>
#include <tessera/collectives/backends/nccl/plugin.h>
#include <tessera/collectives/backends/shared_memory/connect.h>
#include <tessera/collectives/backends/staged/staged_communicator.h>
#include <tessera/collectives/ranks/group_store.h>

#include <absl/algorithm/container.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/StringUtil.h>

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <string_view>
#include <thread>

namespace tessera::internal {

namespace {

std::string failure_key(int64_t rank) { return c10::str("failed/", rank); }

/// The ranks of the group that did not try to connect it: they made none, or one of other ranks or of another order.
std::vector<int64_t> those_who_made_none(const GroupDescription& group) try {
  return group.store->absent();
} catch (const std::exception&) { // the store is gone as well: what the caller caught says more
  return {};
}

/// Those that have not failed to make the group, and may yet do so.
std::vector<int64_t> silent_ranks(const GroupDescription& group) {
  auto silent = absent_ranks(*group.store, group.ranks, failure_key);
  std::erase_if(silent, [&](auto rank) { return group.watch->has_ended(rank); });
  return silent;
}

// Says that the group needs `rank`, which has ended; "" where `why`, this rank's error, is already what that one said of itself.
std::string blame_ended(const GroupDescription& group, int64_t rank, const std::string& why) {
  const auto names = group.watch->blame({rank});
  const auto name = c10::str("rank ", rank);
  const bool says_so_itself = names.starts_with(name + ",") && why.starts_with(name + " failed: ");
  return says_so_itself ? "" : c10::str(": it needs ", names);
}

// Names, when all ranks have tried to connect, the one that has ended, which may be seen only a moment after its connections were
// lost, or those that do not fail soon after this rank, because they were stopped or hang.
std::string blame_for_no_answer(const GroupDescription& group, const std::string& why) try {
  constexpr std::chrono::seconds kPatience(1);
  constexpr std::chrono::milliseconds kInterval(50);
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  std::vector<int64_t> silent;
  do {
    if (const auto origin = group.watch->find_origin(group.ranks)) return blame_ended(group, origin->rank, why);
    silent = silent_ranks(group);
    if (silent.empty()) break;
    group.watch->announce_late(silent);
    std::this_thread::sleep_for(kInterval);
  } while (std::chrono::steady_clock::now() < deadline);
  if (!silent.empty()) {
    const auto known = group.watch->note_timeout(silent);
    return c10::str(": ", list_of_ranks(silent), " did not answer while the group was made", known);
  }
  group.watch->withdraw();
  const auto missing = group.watch->find_missing(group.ranks);
  return missing ? blame_ended(group, missing->rank, why) : "";
} catch (const std::exception&) { // the store is gone as well: what the caller caught says more
  return "";
}

// Says who is the cause, as far as that is known.
std::string blame_for_no_connection(const GroupDescription& group, const std::string& why, bool timed_out) {
  const auto absent = timed_out ? those_who_made_none(group) : std::vector<int64_t>(); // an error before that is this rank's own
  const auto missing = group.watch->find_missing(group.ranks);
  const bool has_ended = missing && absl::c_linear_search(absent, missing->rank);
  if (absent.empty() || has_ended) return blame_for_no_answer(group, why);
  const auto known = group.watch->note_timeout(absent);
  return c10::str(": ", list_of_ranks(absent), " did not connect a group of these ranks in this order", known);
}

/// Whether `blame` says all that `why`, this rank's error, says: that a rank has ended.
bool says_all_of(const std::string& blame, std::string why) {
  constexpr std::string_view kEnded = " has exited or failed";
  return why.ends_with(kEnded) && blame.ends_with(why.insert(why.size() - kEnded.size(), ", which"));
}

/// Tells the others, where the store is there to do so.
void note_failure(const GroupDescription& group, const std::string& text) try {
  const auto own = group.ranks[static_cast<size_t>(group.rank)];
  group.store->set(failure_key(own), "");
  group.store->fail(own, text);
} catch (const std::exception&) {
}

std::mutex registered_mutex;

std::map<at::DeviceType, Backend>& registered() {
  static std::map<at::DeviceType, Backend> backends;
  return backends;
}

CommunicatorPtr make_gloo(const GroupDescription& group) {
  const gloo::ChannelOptions options{
      group.options.timeout, group.options.check_collectives, group.all_local(), group.ranks, group.watch, group.departures()};
  auto channel = gloo::Channel::connect(group.store, group.rank, static_cast<int>(group.ranks.size()), options);
  return std::make_shared<gloo::GlooCommunicator>(group.name, group.ranks, group.rank, std::move(channel));
}

void warn_of_refusal(const GroupDescription& group, const std::string& refusal) {
  static std::atomic<bool> warned{false};
  if (group.rank == 0 && !warned.exchange(true)) {
    TORCH_WARN("the ranks of group ", group.name, " cannot share memory and exchange data over gloo, which is slower: ", refusal);
  }
}

CommunicatorPtr make_gloo_for_want_of_memory(const GroupDescription& group, const std::string& refusal) {
  TORCH_CHECK(group.options.transport != Transport::kSharedMemory, "the ranks cannot share memory: ", refusal);
  warn_of_refusal(group, refusal);
  return make_gloo(group);
}

CommunicatorPtr make_for_cpu(const GroupDescription& group) {
  if (group.options.transport == Transport::kGloo) return make_gloo(group);
  if (shared_memory::can_reach_each_other(group)) {
    const auto connection = shared_memory::connect(group);
    return connection.engine ? connection.communicator(group) : make_gloo_for_want_of_memory(group, connection.refusal);
  }
  if (const auto layout = hierarchical::HostLayout::of(group.hosts, group.rank)) {
    const auto connection = hierarchical::connect(group, *layout);
    return connection.communicator ? connection.communicator : make_gloo_for_want_of_memory(group, connection.refusal);
  }
  return make_gloo(group);
}

CommunicatorPtr make_cuda(const GroupDescription& group) {
  if (!nccl::stages_collectives()) return nccl::make_communicator(group);
  const auto device = nccl::choose_device(group.local_rank);
  return make_staged_communicator(make_for_cpu(group), device);
}

} // namespace

Backend backend_of(at::DeviceType device_type) {
  if (device_type == at::kCPU) return {make_for_cpu, [](int64_t) { return at::Device(at::kCPU); }};
  if (device_type == at::kCUDA) return {make_cuda, nccl::choose_device};
  const std::lock_guard lock(registered_mutex);
  const auto found = registered().find(device_type);
  TORCH_CHECK(found != registered().end(), "there are no collectives for tensors on ", c10::DeviceTypeName(device_type, true),
              ", use cpu or cuda");
  return found->second;
}

void register_backend(at::DeviceType device_type, Backend backend) {
  TORCH_CHECK(device_type != at::kCPU && device_type != at::kCUDA, "register_backend: ", c10::DeviceTypeName(device_type, true),
              " has a backend");
  const std::lock_guard lock(registered_mutex);
  registered()[device_type] = backend;
}

CommunicatorPtr make_backend_communicator(const GroupDescription& group, at::DeviceType device_type) {
  const auto backend = backend_of(device_type);
  const auto own = group.ranks[static_cast<size_t>(group.rank)];
  using std::chrono::steady_clock;
  const auto begin = steady_clock::now();
  try {
    group.store->arrive(own, group.options.timeout);
    const auto end = c10::make_scope_exit([&] { group.store->leave(); });
    auto made = backend.make_communicator(group);
    group.watch->withdraw_ended();
    return made;
  } catch (const std::exception& error) {
    const auto text = c10::str("rank ", own, " cannot connect group ", group.name, " [", c10::Join(", ", group.ranks), "]");
    // Another error of c10 is no loss of a connection: all ranks find it, or this process alone.
    const bool is_own =
        dynamic_cast<const c10::Error*>(&error) != nullptr && dynamic_cast<const c10::DistError*>(&error) == nullptr;
    const auto why = error_text(error);
    note_failure(group, why);
    TORCH_CHECK(!is_own, text, ": ", why);
    const bool timed_out = steady_clock::now() - begin >= group.options.timeout;
    const auto blame = blame_for_no_connection(group, why, timed_out);
    C10_THROW_ERROR(DistNetworkError, c10::str(text, blame, says_all_of(blame, why) ? "" : ": " + why));
  }
}

} // namespace tessera::internal
