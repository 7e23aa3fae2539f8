#pragma once

#include <c10/core/Device.h>

namespace tessera::testing {

/// Where the tests compute that can do so on any device: TESSERA_TEST_DEVICE is `cpu` (the default), `sim` or `cuda`. Another
/// value is an error.
c10::DeviceType test_device_type();

/// This rank's device of that type.
c10::Device test_device();

/// Where the unsharded model computes that a test compares with: on the CPU, but on the same device where its kernels round and
/// draw random numbers otherwise.
inline c10::Device twin_device() { return test_device_type() == c10::kCUDA ? test_device() : c10::Device(c10::kCPU); }

inline bool tests_the_cpu() { return test_device_type() == c10::kCPU; }

} // namespace tessera::testing
