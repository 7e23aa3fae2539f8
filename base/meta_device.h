#pragma once

// Internal: which device the meta device stands for, where what operators keep differs between devices.

#include <c10/core/DeviceType.h>

namespace tessera::internal {

/// Returns that of this thread, the CPU by default. `MetaOperatorsOf` sets it.
inline c10::DeviceType& device_behind_meta() {
  static thread_local auto device = c10::DeviceType::CPU;
  return device;
}

} // namespace tessera::internal
