#pragma once

// Internal: copies between buffers, which a device with streams does in one launch.

#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera::internal {

/// Copies and sums that are collected, and then done together: one call for all of the same dtypes. CUDA launches a call once for
/// each 64 pairs, and where the strides in the pairs differ, once a pair: those are a call of their own. The tensors of a pair
/// have the same sizes; no destination overlaps with another.
class CopyList {
 public:
  void copy(at::Tensor destination, at::Tensor source);
  /// Adds the source to what is there.
  void sum(at::Tensor destination, at::Tensor source) { sums_.add(std::move(destination), std::move(source)); }
  void zero(at::Tensor destination) { zeroed_.push_back(std::move(destination)); }
  /// Runs the copies on the current stream.
  void run();

 private:
  struct Pairs {
    void add(at::Tensor destination, at::Tensor source);
    /// Takes out of the list the pairs that have the dtypes of the first, and strides that differ in a pair as there or do not.
    Pairs take_alike();
    std::vector<at::Tensor> destinations, sources;
  };

  Pairs copies_, sums_;
  std::vector<at::Tensor> zeroed_;
};

} // namespace tessera::internal
