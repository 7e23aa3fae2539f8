#pragma once

// Internal: copies between buffers, which a device with streams does in one launch.

#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera::internal {

/// Copies and sums that are collected, and then done together: one launch for all of the same dtypes, whatever their number. The
/// tensors of a pair have the same sizes; no destination overlaps with another.
class CopyList {
 public:
  void copy(at::Tensor destination, at::Tensor source) { copies_.add(std::move(destination), std::move(source)); }
  /// Adds the source to what is there.
  void sum(at::Tensor destination, at::Tensor source) { sums_.add(std::move(destination), std::move(source)); }
  void zero(at::Tensor destination) { zeroed_.push_back(std::move(destination)); }
  /// On the current stream.
  void run();

 private:
  struct Pairs {
    void add(at::Tensor destination, at::Tensor source);
    /// Those with the dtypes of the first, which leave the list.
    Pairs take_alike();
    std::vector<at::Tensor> destinations, sources;
  };

  Pairs copies_, sums_;
  std::vector<at::Tensor> zeroed_;
};

} // namespace tessera::internal
