#pragma once

#include <tessera/collectives/ranks/group_description.h>

#include <string>

namespace tessera::internal::nccl {

/// What a rank says of its device before a group is connected.
struct DeviceAnswer {
  std::string identity; ///< equal on ranks that use the same device; empty where there is none
  std::string error;    ///< why there is none
};

enum class SharedDevices { kRefused, kAllowed };

/// Tells the other ranks of the group which device this one has, and waits for their answers, at most the group's timeout. Called
/// by every rank of the group, once. Throws on all ranks, naming ranks, where one has no device, or where two share one and that
/// is refused. NCCL itself would wait without a limit for a rank that does not come.
void agree_on_devices(const GroupDescription& group, const DeviceAnswer& own, SharedDevices shared);

} // namespace tessera::internal::nccl
