#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace tessera::benchmarks {

/// Blocks until the device has done all that was launched. Nothing on the CPU.
void synchronize(c10::Device device);

/// The most bytes that LibTorch's allocator has had in use on the device since the process began.
int64_t peak_bytes(c10::Device device);

} // namespace tessera::benchmarks
