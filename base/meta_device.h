#pragma once

// Internal: which device the meta device stands for, where what operators keep differs between devices.

#include <c10/core/DeviceType.h>

#include <tessera/base/per_thread.h>

namespace tessera::internal {

struct BehindMeta {
  c10::DeviceType device = c10::DeviceType::CPU;
};
inline constinit PerThread<BehindMeta> behind_meta;

/// Returns that of this thread, the CPU by default. `MetaOperatorsOf` sets it.
inline c10::DeviceType& device_behind_meta() { return behind_meta->device; }

} // namespace tessera::internal
