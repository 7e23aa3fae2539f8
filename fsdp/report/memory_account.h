#pragma once

// Internal: what a rank holds in a step that is predicted, at each moment of it.

#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <utility>
#include <variant>

#include <tessera/base/free_blocks.h>
#include <tessera/fsdp/memory_prediction.h>

namespace tessera::internal {

/// The blocks of a model, which BlockCache keeps and hands out on the CPU; another device's allocator does.
class PredictedBlocks {
 public:
  explicit PredictedBlocks(c10::Device device) : keeps_(device.is_cpu()) {}

  /// The size of the block.
  int64_t take(int64_t bytes) { return keeps_ ? kept_.take(bytes).first : bytes; }
  void give_back(int64_t size) {
    if (keeps_) kept_.add(size, {});
  }
  int64_t cached() const { return kept_.bytes(); }

 private:
  bool keeps_;
  FreeBlocks<std::monostate> kept_;
};

/// Sums what is held, and remembers the moment that holds most.
class MemoryAccount {
 public:
  MemoryAccount(c10::Device device, MemoryPrediction known) : now(std::move(known)), blocks(device) {}

  MemoryPrediction now; ///< without its peak
  PredictedBlocks blocks;

  /// Says that `what` happens now, of which a peak is noted.
  void begin(std::string what) { what_ = std::move(what); }
  void note() {
    now.cached = blocks.cached();
    now.peak = now.parameters + now.buffers + now.optimizer_state + now.gradients + now.unsharded + now.reduce_buffers +
               now.cached + now.activations + now.temporaries;
    if (now.peak <= peak_.peak) return;
    peak_ = now;
    peak_.peak_at = what_;
  }
  void forget_peak() { peak_ = {}; }
  const MemoryPrediction& peak() const { return peak_; }

 private:
  std::string what_;
  MemoryPrediction peak_;
};

} // namespace tessera::internal
