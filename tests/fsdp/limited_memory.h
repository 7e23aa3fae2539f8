#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <limits>

namespace tessera::testing {

/// While it lives, the CPU has no memory for a tensor of `bytes` or more.
class LimitedMemory final : public c10::Allocator {
 public:
  explicit LimitedMemory(size_t bytes) : limit_(bytes), whole_(c10::GetAllocator(c10::kCPU)) {
    c10::SetAllocator(c10::kCPU, this, kPriority);
  }
  ~LimitedMemory() override { c10::SetAllocator(c10::kCPU, whole_, kPriority); }
  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK_WITH(OutOfMemoryError, bytes < limit_, "tried to allocate ", bytes, " bytes");
    return whole_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return whole_->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override { whole_->copy_data(to, from, bytes); }

 private:
  static constexpr uint8_t kPriority = std::numeric_limits<uint8_t>::max();
  size_t limit_;
  c10::Allocator* whole_;
};

} // namespace tessera::testing
