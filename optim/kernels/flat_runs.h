#pragma once

// Internal: where the elements of a rank's part lie in the flattened tensor.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tessera::internal {

/// Elements that follow one another both in a rank's part and in the tensor.
struct FlatRun {
  int64_t position; ///< of the first in the flattened tensor
  int64_t offset;   ///< of the first in the part
  int64_t length;
};

/// The runs of this rank's part of `like` (a plain tensor or a DTensor), which is row-major, by ascending position.
std::vector<FlatRun> flat_runs(const at::Tensor& like);

/// The runs, cut so that none is longer than `most`, at positions that are multiples of it.
std::vector<FlatRun> cut_runs(const std::vector<FlatRun>& runs, int64_t most);

} // namespace tessera::internal
