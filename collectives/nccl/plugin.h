#pragma once

#include <tessera/collectives/backend.h>

namespace tessera::internal::nccl {

// libtessera itself does not depend on CUDA: what does is in the plugin libtessera_nccl.so beside it, which is loaded when CUDA
// is first asked for. These two functions are the plugin's, found by name.
using MakeCommunicator = void(const GroupDescription& group, CommunicatorPtr& made);
using DeviceCount = int();
inline constexpr const char* kMakeCommunicatorName = "tessera_nccl_make_communicator";
inline constexpr const char* kDeviceCountName = "tessera_nccl_device_count";

/// Connects the group over NCCL. An error when this build has no plugin, or it cannot be loaded.
CommunicatorPtr make_communicator(const GroupDescription& group);

/// Loads the plugin, and with it LibTorch's CUDA libraries. Throws the reason why CUDA tensors cannot be used in this process.
void require_cuda();

} // namespace tessera::internal::nccl
