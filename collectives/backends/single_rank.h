#pragma once

#include <tessera/collectives/communicator.h>

namespace tessera::internal {

/// The communicator of a group of one rank, on any device: a copy, or nothing where output and input are the same memory. No
/// communication, and the counters stay 0.
CommunicatorPtr make_single_rank_communicator(std::string name, int64_t rank, at::DeviceType device_type);

} // namespace tessera::internal
