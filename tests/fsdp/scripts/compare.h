#pragma once

#include <string>

#include <tessera/tests/fsdp/scripts/side.h>

namespace tessera::testing::scripts {

/// By how much two sides may differ.
struct Tolerance {
  enum class Of {
    kElement, ///< relative to 1 + |the element|
    kTensor,  ///< relative to the largest of the tensor's elements, or of the ranks' gradients that made them
  };
  double bound;
  Of of;
};

/// Each of these says on this rank what differs between two sides by more than that; "" for nothing.

/// The recorded numbers. Every rank calls it, with as many of them.
std::string difference_of_recorded(const Side& plain, const Side& sharded, const Tolerance& tolerance);
/// Parameters, buffers, and gradients where all are reduced. Local: each rank compares its own part.
std::string difference_of_state(const Side& plain, const Side& sharded, const Tolerance& tolerance);

/// Whether the numbers of the unsharded models, and what they recorded, are finite and at most `largest`. A script that diverges
/// ends there.
bool is_bounded(const Side& plain, double largest);

/// The sum of every rank's `value`. Every rank calls it.
int64_t sum_over_ranks(int64_t value);

} // namespace tessera::testing::scripts
