#pragma once

// Internal: initial weights that are the same however they are sharded.

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera::internal::experts {

enum class WeightKind {
  kStacked, ///< [experts, out, in]: each expert's by itself
  kSingle,  ///< [out, in]
};

/// A seed of its own for each pair of numbers.
uint64_t seed_of(uint64_t seed, uint64_t number);

/// Draws the weights uniformly from ±1/sqrt(in), each expert's with a seed of its own: this rank's part of them, where they are a
/// DTensor. Expert e of stacked ones gets what a single weight gets with `seed_of(seed, e)`.
void draw_weights(const at::Tensor& weights, WeightKind kind, uint64_t seed);

} // namespace tessera::internal::experts
