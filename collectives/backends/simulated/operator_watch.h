#pragma once

#include <ATen/record_function.h>

#include <cstdint>
#include <functional>

namespace tessera::internal {

/// What one operator does on the rank.
struct OperatorWork {
  double flops = 0; ///< of a matrix product, a convolution or attention
  double bytes = 0; ///< that it reads and writes, where they are counted
  bool is_attention = false;
  bool is_float8 = false;   ///< a product in fp8
  bool is_on_parts = false; ///< an operator on DTensors, views too: what its kernels do on the parts is told for itself
};

/// How many operators ran.
struct OperatorCounts {
  int64_t kernels = 0;  ///< that computed or moved something
  int64_t on_parts = 0; ///< ... operators on DTensors, each of which has called some of these or a view
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

/// The operator that runs on this thread does nothing itself, as its result was kept. What it calls from now on is told.
void forget_running_operator();

/// Calls `call`, and counts its operators on this thread as a watch does. None is told of them.
OperatorCounts count_operators(const std::function<void()>& call);

} // namespace tessera::internal
