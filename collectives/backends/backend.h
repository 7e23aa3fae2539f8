#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/collectives/communicator.h>
#include <tessera/collectives/ranks/group_description.h>

#include <cstdint>

namespace tessera::internal {

/// What a device type needs to have meshes.
struct Backend {
  /// Connects the group. Called by every rank of it. What it throws gets the group's name and the ranks that are to blame.
  CommunicatorPtr (*make_communicator)(const GroupDescription& group);
  /// The device of the process with this index on its host, which is made the calling thread's current one. Throws where there is
  /// none.
  at::Device (*choose_device)(int64_t local_rank);
};

/// Shared memory or gloo for the CPU, NCCL (libtessera_nccl.so) for CUDA, and what was registered. An error for other device
/// types.
Backend backend_of(at::DeviceType device_type);

/// Registers a backend for a device type of the program's own, such as PrivateUse1. Call it before the first mesh of that type.
void register_backend(at::DeviceType device_type, Backend backend);

/// Connects the group. Called by every rank of it. An error that names the ranks which do not come within the group's timeout.
CommunicatorPtr make_backend_communicator(const GroupDescription& group, at::DeviceType device_type);

} // namespace tessera::internal
