#pragma once

#include <tessera/collectives/backends/nccl/plugin.h>
#include <tessera/collectives/communicator.h>
#include <tessera/collectives/ranks/group_description.h>

namespace tessera::internal::nccl {

/// Collectives on CUDA tensors over c10d's NCCL process group, connected at once. Called by every rank of the group, each with a
/// device of its own.
CommunicatorPtr make_nccl_communicator(const GroupDescription& group, int device, CudaBuffers buffers);

} // namespace tessera::internal::nccl
