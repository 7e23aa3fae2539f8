#pragma once

// Internal: the host's memory beside a device.

#include <memory>

#include <tessera/offload/offload_memory.h>

namespace tessera::internal {

/// The host's memory, page-locked or not.
std::shared_ptr<OffloadMemory> make_host_memory(bool pinned);

} // namespace tessera::internal
