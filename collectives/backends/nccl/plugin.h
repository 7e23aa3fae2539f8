#pragma once

#include <tessera/collectives/communicator.h>
#include <tessera/collectives/ranks/group_description.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace tessera::internal::nccl {

/// Where what a communicator sends and receives of a sharded model lies (TESSERA_CUDA_BUFFERS).
enum class CudaBuffers {
  kCaching,   ///< in memory of LibTorch's allocator
  kRegistered ///< in memory that NCCL allocated and knows
};

/// What needs CUDA's headers. It is in libtessera_nccl.so beside libtessera, which is loaded when CUDA is first asked for, so
/// that libtessera itself depends on no CUDA library.
class CudaSide {
 public:
  virtual ~CudaSide() = default;
  /// How many devices this process sees, at least one. Throws the reason where there is none.
  virtual int device_count() = 0;
  /// Makes the device the calling thread's current one, without touching it yet.
  virtual void set_device(int device) = 0;
  /// Equal in two processes where they use the same device.
  virtual std::string device_identity(int device) = 0;
  /// Connects the group over NCCL, on that device. All ranks of the group call it, after they have agreed on their devices.
  virtual CommunicatorPtr make_communicator(const GroupDescription& group, int device, CudaBuffers buffers) = 0;
};

/// What both sides were built with. A library that an older build has left beside this one would call other functions.
struct Interface {
  int version = 2; ///< grows with each virtual function of `CudaSide` or `Communicator` that is added, removed or moved
  size_t communicator = sizeof(Communicator), group = sizeof(GroupDescription);
  bool operator==(const Interface&) const = default;
};

/// The plugin's only function that is found by name. Null where its interface is another one.
using GetCudaSide = CudaSide*(const Interface& interface);
inline constexpr const char* kGetCudaSideName = "tessera_cuda_side_of_interface";

/// TESSERA_CUDA_COLLECTIVES: through the host, and not by NCCL.
bool stages_collectives();

/// Throws for a TESSERA_LOAD_CUDA or TESSERA_CUDA_* that means nothing, with a device or without.
void check_settings();

/// Loads the plugin, and with it LibTorch's CUDA libraries. Throws the reason why CUDA tensors cannot be used in this process.
CudaSide& require_cuda_side();

/// The device of this process: TESSERA_CUDA_DEVICE where `chosen` (its value) is not empty, the only device where it sees one,
/// and otherwise the device of its index on its host. Throws where there is no such device.
int device_index(const std::string& chosen, int64_t local_rank, int device_count);

/// The same for this process, and makes it the calling thread's current device. Throws where CUDA cannot be used, or has no such
/// device.
at::Device choose_device(int64_t local_rank);

/// Connects the group over NCCL. Every rank of the group calls it. Each first says in the group's store which device it has, or
/// why it has none, and waits for what the others say, at most the group's timeout. Throws the same error on all ranks where one
/// has no device, or a TESSERA_CUDA_BUFFERS that means nothing, or where two have the same device.
CommunicatorPtr make_communicator(const GroupDescription& group);

} // namespace tessera::internal::nccl
