#pragma once

#include <ATen/record_function.h>

namespace tessera::internal {

/// What one operator does on the rank.
struct OperatorWork {
  double flops = 0; ///< of a matrix product, a convolution or attention
  double bytes = 0; ///< that it reads and writes, where they are counted
  bool is_attention = false;
  bool is_of_dtensors = false; ///< an operator on DTensors has called it
};

/// While one lives, `count` is told of the work of each call of an operator on any thread, but not of what such a call makes of
/// other calls: `mv` calls `addmv_`, which does the work; of a product that calls another one the outer counts. Bytes are counted
/// where some watch counts them. All watches have the same `count`.
class OperatorWatch {
 public:
  using Count = void (*)(const OperatorWork& work);
  OperatorWatch(Count count, bool counts_bytes);
  ~OperatorWatch();
  OperatorWatch(const OperatorWatch&) = delete;
  OperatorWatch& operator=(const OperatorWatch&) = delete;

 private:
  bool counts_bytes_;
};

} // namespace tessera::internal
