#pragma once

// Internal: parts of sequences, put together and taken apart.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include <tessera/mesh/part_order.h>

namespace tessera::internal {

/// A split sequence: how, how long with its padding, and over how many ranks.
struct SplitSequence {
  PartLayout layout;
  int64_t length = 0, ranks = 1;

  int64_t part_length() const { return length / ranks; }
  int64_t length_without_padding() const { return length - layout.padding; }
  /// What rank `rank` holds, without padding; ranges without positions are left out.
  std::vector<HeldRange> held_by(int64_t rank) const;
  /// The whole sequence as one range, without padding.
  std::vector<HeldRange> whole() const { return {{0, 0, {0, length_without_padding()}}}; }
};

/// The part of rank `rank` of a whole tensor, padding included; a copy.
at::Tensor part_of(const at::Tensor& whole, int64_t dim, const SplitSequence& sequence, int64_t rank);

/// The whole of the ranks' parts, in the order of the positions, padding included; a copy.
at::Tensor whole_of(const std::vector<at::Tensor>& parts, int64_t dim, const SplitSequence& sequence);

/// An error of `caller` that names the nearest lengths unless the sequence divides into equal parts.
void check_divides(const SplitSequence& sequence, const char* caller);

} // namespace tessera::internal
