#pragma once

// Internal: many copies out of one buffer, for devices with streams.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace tessera::internal {

/// Up to so many pairs CUDA copies in two launches of a `CopyList`. More of them are better copied by way of a table, which is
/// brought to the device, and one launch, whatever their number.
inline constexpr int64_t kMostPairs = 128;

/// Copies columns of a matrix of bytes, each to memory of its own (FSDP2's `split_with_sizes_copy`).
class RowSplit {
 public:
  /// `rows` is dense.
  explicit RowSplit(at::Tensor rows) : rows_(std::move(rows)) {}

  /// To `destination`, of as many rows and dense, from the column `begin` on: behind all columns of the calls before.
  void copy(int64_t begin, at::Tensor destination);
  /// Runs the copies on the current stream. Columns between are copied too, to memory that is freed again.
  void run();

 private:
  struct Columns {
    int64_t begin;
    at::Tensor destination;
  };

  at::Tensor rows_;
  std::vector<Columns> columns_;
};

} // namespace tessera::internal
