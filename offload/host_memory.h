#pragma once

// Internal: the host's memory beside a device.

#include <c10/core/Allocator.h>

#include <memory>

#include <tessera/offload/offload_memory.h>

namespace tessera::internal {

/// The allocator of page-locked memory, for the process' accelerator. An error where it has none.
c10::Allocator* pinned_allocator();

/// The host's memory, page-locked or not.
std::shared_ptr<OffloadMemory> make_host_memory(bool pinned);

} // namespace tessera::internal
