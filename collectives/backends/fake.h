#pragma once

#include <tessera/collectives/communicator.h>

namespace tessera::internal {

/// A communicator of `ranks` of which only this process exists, as the `rank`-th, on any device. Every collective is done when it
/// returns, with the result that it has where each rank holds what this one does. Nothing is sent; the counters count what would
/// be.
CommunicatorPtr make_fake_communicator(std::string name, RankList ranks, int rank, at::DeviceType device_type);

} // namespace tessera::internal
