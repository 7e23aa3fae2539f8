#pragma once

// Internal: the ranks that take an optimizer's step together.

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <vector>

namespace tessera::internal {

/// The ranks of all meshes that the optimizer's parameters are on, ascending; none where they are plain.
std::vector<int64_t> ranks_of(const torch::optim::Optimizer& optimizer);

} // namespace tessera::internal
