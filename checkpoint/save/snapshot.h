#pragma once

// Internal: what one rank brings to a save, with its memory.

#include <ATen/core/Tensor.h>

#include <vector>

#include <tessera/checkpoint/save/plan.h>
#include <tessera/checkpoint/state_dict.h>

namespace tessera::internal {

/// `data[i][k]` is the memory of box k of tensor i of `state`.
struct Snapshot {
  RankState state;
  std::vector<std::vector<at::Tensor>> data;
};

/// A snapshot that aliases the tensors of `state`. Errors name the tensor: a dtype that the format lacks, a meta tensor, a
/// Partial placement.
Snapshot snapshot_of(const StateDict& state);

/// Memory on the host that successive snapshots are copied to.
class HostCopies {
 public:
  /// Copies the data of `snapshot` to the host (pinned memory for data on a GPU), into the memory of the last call where its
  /// sizes are the same. The result aliases this object's memory: it is valid until the next call.
  Snapshot copy(const Snapshot& snapshot);

 private:
  std::vector<at::Tensor> memory_; ///< in the order of all tensors and boxes
};

} // namespace tessera::internal
