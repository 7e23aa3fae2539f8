#pragma once

#include <c10/core/Device.h>

namespace tessera::testing {

/// Where the tests compute that can do so on any device: TESSERA_TEST_DEVICE is `cpu` (the default), `sim` or `cuda`. Another
/// value is an error.
c10::DeviceType test_device_type();

/// This rank's device of that type.
c10::Device test_device();

inline bool tests_the_cpu() { return test_device_type() == c10::kCPU; }

} // namespace tessera::testing
