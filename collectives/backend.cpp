#include <tessera/collectives/backend.h>

#include <tessera/collectives/error_text.h>
#include <tessera/collectives/gloo/gloo_communicator.h>
#include <tessera/collectives/nccl/plugin.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace tessera {

namespace {

std::string arrival_key(int64_t rank) { return c10::str("arrived/", rank); }

/// The ranks of the group that did not try to connect it: they made none, or one of other ranks or of another order.
std::vector<int64_t> absent_ranks(const GroupDescription& group) {
  std::vector<int64_t> absent;
  try {
    for (const auto rank : group.ranks)
      if (!group.store->check({arrival_key(rank)})) absent.push_back(rank);
  } catch (const std::exception&) { // the store is gone as well: what the caller caught says more
    absent.clear();
  }
  return absent;
}

CommunicatorPtr make_gloo(const GroupDescription& group) {
  gloo::ChannelOptions options;
  options.timeout = group.options.timeout;
  options.check_signatures = group.options.check_collectives;
  options.all_local = group.all_local;
  try {
    group.store->set(arrival_key(group.ranks[static_cast<size_t>(group.rank)]), "");
    auto channel = std::make_shared<gloo::Channel>(group.store, group.rank, static_cast<int>(group.ranks.size()), options);
    return std::make_shared<gloo::GlooCommunicator>(group.name, group.ranks, group.rank, std::move(channel));
  } catch (const std::exception& error) {
    const auto absent = absent_ranks(group);
    C10_THROW_ERROR(DistNetworkError, c10::str("rank ", group.ranks[static_cast<size_t>(group.rank)], " cannot connect group ",
                                               group.name, " [", c10::Join(", ", group.ranks), "]",
                                               absent.empty() ? ""
                                                              : c10::str(": rank(s) ", c10::Join(", ", absent),
                                                                         " did not connect a group of these ranks in this order"),
                                               ": ", error_text(error)));
  }
}

} // namespace

CommunicatorPtr make_backend_communicator(const GroupDescription& group, at::DeviceType device_type) {
  switch (device_type) {
    case at::kCPU: return make_gloo(group);
    default: TORCH_CHECK(false, "no collectives for tensors on ", device_type, ": use a CPU or CUDA mesh");
  }
}

} // namespace tessera
