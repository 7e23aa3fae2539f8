#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

namespace tessera::benchmarks {

/// Counts the bytes that this thread, and autograd's for it, hold of LibTorch's memory and of the communicators' while it lives.
class MemoryMeter {
 public:
  int64_t now() const { return counter_->now; }
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

} // namespace tessera::benchmarks
