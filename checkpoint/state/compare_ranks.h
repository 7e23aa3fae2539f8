#pragma once

// Internal: plain tensors of one name, compared between ranks.

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <tessera/checkpoint/state/ranks.h>

namespace tessera::internal {

/// Plain tensors under the names by which ranks compare them.
using ComparedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// A name that not all of its ranks have the same values for.
struct RankDifference {
  std::vector<int> ranks;  ///< that have a tensor of this name, ascending
  std::vector<int> others; ///< those of them whose values are not the first one's
};

/// Compares the bytes of the tensors that `read` gives on each rank, and gives every rank the names that differ. Every rank calls
/// it. Each reads its tensors once. Ranks exchange a checksum of all, and where these differ, one of each tensor.
std::map<std::string, RankDifference> compare_ranks(const Ranks& ranks, const std::function<ComparedTensors()>& read);

} // namespace tessera::internal
