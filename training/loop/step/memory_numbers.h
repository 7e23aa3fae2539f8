#pragma once

// Internal: how much memory this process has.

#include <c10/core/Device.h>

#include <cstdint>

namespace tessera::internal {

/// Bytes that the process keeps in memory (the resident set); 0 where the system does not say.
int64_t resident_bytes();
/// Bytes of tensors on the device; 0 on the CPU, and where the device's allocator does not count.
int64_t device_bytes(c10::Device device);

} // namespace tessera::internal
