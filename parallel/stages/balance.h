#pragma once

// Internal: where a list of layers is cut.

#include <cstdint>
#include <string>
#include <vector>

#include <tessera/parallel/pipeline_stages.h>

namespace tessera::internal::pipeline {

/// What a layer counts for the cuts.
struct LayerSize {
  double cost = 0;
  int64_t parameters = 0; ///< elements
};

/// The first layer of each of `stages` stages, and the number of layers, so that the dearest stage costs as little as it can and
/// each has parameters. Throws where there is no such cut.
std::vector<int64_t> balanced_bounds(const std::vector<LayerSize>& layers, int64_t stages);

/// Checks the bounds that a program gave, and adds those of both ends.
std::vector<int64_t> given_bounds(const std::vector<int64_t>& inner, const std::vector<LayerSize>& layers, int64_t stages);

} // namespace tessera::internal::pipeline
