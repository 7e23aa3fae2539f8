#pragma once

// Internal: the memory that a policy asks for.

#include <c10/core/Device.h>

#include <memory>

#include <tessera/offload/offload_memory.h>
#include <tessera/offload/offload_policy.h>

namespace tessera::internal {

/// The memory of a policy for the state of one group on `device`; null where that is the device's own. Errors of the policy.
std::shared_ptr<OffloadMemory> make_offload_memory(const OffloadPolicy& policy, c10::Device device);

} // namespace tessera::internal
