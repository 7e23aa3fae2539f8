#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/collectives/calls/signature.h>
#include <tessera/collectives/communicator.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace tessera::internal {

struct AllToAllSplits {
  std::vector<int64_t> output, input; ///< elements a rank

  /// The bytes sent to each rank, then those expected from each, for elements of `width` bytes.
  std::vector<int64_t> byte_counts(int64_t width) const;
};

/// One call of a collective, with all that the functions of `Communicator` are given.
struct CollectiveCall {
  CollectiveKind kind;
  std::string_view label; ///< lives as long as the call of the function: copy it for what outlives that
  /// Where the collective works in place, both are its tensor. A send has no output, a receive no input, a barrier neither.
  at::Tensor output = {}, input = {};
  ReduceOp op = ReduceOp::kSum;
  std::optional<double> factor = {}; ///< of reduce_scatter_scaled
  int peer = -1;                     ///< the root, the receiver or the sender, as an index of the group's ranks
  AllToAllSplits splits = {};        ///< empty lists: equal parts, until `check` has filled them in

  /// The larger of the two tensors.
  const at::Tensor& full() const;
  /// Of `full`; 0 where there is none, or the checks refuse it.
  int64_t bytes() const;
  /// The signature without its sequence number.
  Signature signature() const;
  /// Calls the same of another communicator.
  Work issue_on(Communicator& other) const;
};

} // namespace tessera::internal
