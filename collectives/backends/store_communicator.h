#pragma once

#include <c10/util/intrusive_ptr.h>
#include <tessera/collectives/communicator.h>
#include <tessera/collectives/process_group_options.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::internal {

/// A group of ranks that have a store in common, and no job of `init_process_group`: PyTorch's process groups in Python.
struct StoreGroup {
  c10::intrusive_ptr<c10d::Store> store; ///< with keys of this group alone
  std::string name;
  std::vector<int64_t> ranks; ///< global, in group order
  int rank = 0;               ///< this process's index in `ranks`
  ProcessGroupOptions options;
};

/// Connects the group: the same communicator that `ProcessContext` makes, whose errors know of the group's ranks alone. Called by
/// every rank of it, again for each time that the group is made anew in the same store. An error that names the ranks which do
/// not come within the timeout.
CommunicatorPtr make_communicator(const StoreGroup& group, at::DeviceType device_type);

} // namespace tessera::internal
