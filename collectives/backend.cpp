#include <tessera/collectives/backend.h>

#include <tessera/collectives/error_text.h>
#include <tessera/collectives/gloo/gloo_communicator.h>
#include <tessera/collectives/group_store.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <chrono>

namespace tessera::internal {

namespace {

std::string arrival_key(int64_t rank) { return c10::str("arrived/", rank); }

/// The ranks of the group that did not try to connect it: they made none, or one of other ranks or of another order.
std::vector<int64_t> those_who_made_none(const GroupDescription& group) try {
  return absent_ranks(*group.store, group.ranks, arrival_key);
} catch (const std::exception&) { // the store is gone as well: what the caller caught says more
  return {};
}

// Says who is the cause, as far as that is known.
std::string blame_for_no_connection(const GroupDescription& group, bool timed_out) {
  if (const auto missing = group.watch->find_missing(group.ranks))
    return c10::str(": it needs ", group.watch->blame({missing->rank}));
  const auto absent = timed_out ? those_who_made_none(group) : std::vector<int64_t>(); // an error before that is this rank's own
  if (absent.empty()) return "";
  group.watch->note_timeout(absent[0]);
  return c10::str(": rank(s) ", c10::Join(", ", absent), " did not connect a group of these ranks in this order");
}

CommunicatorPtr make_gloo(const GroupDescription& group) {
  const gloo::ChannelOptions options{group.options.timeout, group.options.check_collectives, group.all_local, group.ranks,
                                     group.watch};
  const auto own = group.ranks[static_cast<size_t>(group.rank)];
  using std::chrono::steady_clock;
  const auto begin = steady_clock::now();
  try {
    group.store->set(arrival_key(own), "");
    auto channel = gloo::Channel::connect(group.store, group.rank, static_cast<int>(group.ranks.size()), options);
    return std::make_shared<gloo::GlooCommunicator>(group.name, group.ranks, group.rank, std::move(channel));
  } catch (const std::exception& error) {
    const auto text = c10::str("rank ", own, " cannot connect group ", group.name, " [", c10::Join(", ", group.ranks), "]");
    // Another error of c10 is about this process alone.
    const bool is_own =
        dynamic_cast<const c10::Error*>(&error) != nullptr && dynamic_cast<const c10::DistError*>(&error) == nullptr;
    TORCH_CHECK(!is_own, text, ": ", error_text(error));
    const bool timed_out = steady_clock::now() - begin >= group.options.timeout;
    C10_THROW_ERROR(DistNetworkError, c10::str(text, blame_for_no_connection(group, timed_out), ": ", error_text(error)));
  }
}

} // namespace

CommunicatorPtr make_backend_communicator(const GroupDescription& group, at::DeviceType device_type) {
  switch (device_type) {
    case at::kCPU: return make_gloo(group);
    default: TORCH_CHECK(false, "no collectives for tensors on ", device_type, ": use a CPU mesh");
  }
}

} // namespace tessera::internal
