#include <tessera/collectives/backend.h>

#include <tessera/collectives/error_text.h>
#include <tessera/collectives/gloo/gloo_communicator.h>
#include <tessera/collectives/nccl/plugin.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace tessera {

namespace {

CommunicatorPtr make_gloo(const GroupDescription& group) {
  gloo::ChannelOptions options;
  options.timeout = group.options.timeout;
  options.check_signatures = group.options.check_collectives;
  options.all_local = group.all_local;
  try {
    auto channel = std::make_shared<gloo::Channel>(group.store, group.rank, static_cast<int>(group.ranks.size()), options);
    return std::make_shared<gloo::GlooCommunicator>(group.name, group.ranks, group.rank, std::move(channel));
  } catch (const std::exception& error) {
    C10_THROW_ERROR(
        DistNetworkError,
        c10::str("rank ", group.ranks[group.rank], " cannot connect group ", group.name, " [", c10::Join(", ", group.ranks),
                 "] (was every one of these ranks there, and did it make the same call?): ", error_text(error)));
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
