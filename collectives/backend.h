#pragma once

#include <c10/util/intrusive_ptr.h>
#include <tessera/collectives/communicator.h>
#include <tessera/collectives/process_context.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>
#include <vector>

namespace tessera {

/// What a backend needs to connect a group of two or more ranks.
struct GroupDescription {
  std::string name;
  std::vector<int64_t> ranks; ///< global, in group order
  int rank = 0;               ///< this process's index in `ranks`
  int local_rank = 0;         ///< its index on its host: the CUDA device
  bool all_local = true;      ///< all ranks are on one host
  ProcessGroupOptions options;
  c10::intrusive_ptr<c10d::Store> store; ///< this group's own keys
};

/// Connects the group. CPU: gloo; CUDA: NCCL, from libtessera_nccl.so. Called by every rank of the group.
CommunicatorPtr make_backend_communicator(const GroupDescription& group, at::DeviceType device_type);

} // namespace tessera
