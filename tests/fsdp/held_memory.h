#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

namespace tessera::testing {

/// Counts the bytes that this thread, and autograd's for it, hold of LibTorch's memory on the CPU, of what was allocated since
/// this was made.
class HeldMemory {
 public:
  int64_t peak() const { return counter_->peak; }
  /// The peak is that from here on.
  void forget_peak() { counter_->peak = counter_->now.load(); }

 private:
  struct Counter final : c10::MemoryReportingInfoBase {
    bool memoryProfilingEnabled() const override { return true; }
    void reportMemoryUsage(void* /*memory*/, int64_t bytes, size_t /*allocated*/, size_t /*reserved*/, c10::Device) override {
      now += bytes;
      peak = std::max(peak.load(), now.load());
    }
    std::atomic<int64_t> now = 0, peak = 0;
  };

  std::shared_ptr<Counter> counter_ = std::make_shared<Counter>();
  c10::DebugInfoGuard guard_{c10::DebugInfoKind::PROFILER_STATE, counter_};
};

} // namespace tessera::testing
