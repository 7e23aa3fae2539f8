#pragma once

#include <tessera/collectives/backends/thread_ranks/meeting.h>
#include <tessera/collectives/communicator.h>

namespace tessera::internal {

/// Makes a communicator between ranks that are threads of this process, for CPU tensors; an error for another device type.
CommunicatorPtr make_thread_communicator(Meetings& meetings, std::string name, RankList ranks, int rank,
                                         at::DeviceType device_type);

} // namespace tessera::internal
