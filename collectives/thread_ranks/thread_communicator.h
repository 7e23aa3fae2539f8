#pragma once

#include <tessera/collectives/communicator.h>
#include <tessera/collectives/thread_ranks/meeting.h>

namespace tessera::internal {

/// Between ranks that are threads of this process, for CPU tensors; an error for another device type.
CommunicatorPtr make_thread_communicator(Meetings& meetings, std::string name, RankList ranks, int rank,
                                         at::DeviceType device_type);

} // namespace tessera::internal
