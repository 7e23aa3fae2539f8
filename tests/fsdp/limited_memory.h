#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <limits>

namespace tessera::testing {

/// While it lives, a device has no memory for a tensor of `bytes` or more, but for the first `spared` of them.
class LimitedMemory final : public c10::Allocator {
 public:
  explicit LimitedMemory(size_t bytes, c10::DeviceType device = c10::kCPU, int spared = 0)
      : limit_(bytes), spared_(spared), device_(device), whole_(c10::GetAllocator(device)) {
    c10::SetAllocator(device_, this, kPriority);
  }
  ~LimitedMemory() override { c10::SetAllocator(device_, whole_, kPriority); }
  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK_WITH(OutOfMemoryError, bytes < limit_ || spared_-- > 0, "tried to allocate ", bytes, " bytes");
    return whole_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return whole_->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override { whole_->copy_data(to, from, bytes); }

 private:
  static constexpr uint8_t kPriority = std::numeric_limits<uint8_t>::max();
  size_t limit_;
  int spared_;
  c10::DeviceType device_;
  c10::Allocator* whole_;
};

} // namespace tessera::testing
