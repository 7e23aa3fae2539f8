#pragma once

// Internal: memory for what a model keeps while nothing computes with it.

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace tessera::internal {

/// A copy on its way.
class Fetch {
 public:
  virtual ~Fetch() = default;
  /// Returns when what comes next on the device finds the copy. Errors name what failed.
  virtual void wait() = 0;
};

/// Nothing to wait for.
class FinishedFetch final : public Fetch {
 public:
  void wait() override {}
};

/// What failed where it could not be told to all ranks: the next step throws it.
class DelayedFailure {
 public:
  void note(std::string text) {
    const std::lock_guard lock(mutex_);
    if (text_.empty()) text_ = std::move(text);
  }
  /// Empty for none.
  std::string take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(text_, {});
  }

 private:
  std::mutex mutex_;
  std::string text_;
};

/// One kind of memory: the host's, or files. The CPU reads and writes what lies in it as any other memory, at any time.
class OffloadMemory {
 public:
  virtual ~OffloadMemory() = default;
  /// Sees to it that `bytes` more can be allocated. An error says why not.
  virtual void reserve(int64_t bytes) = 0;
  /// Zeros where this memory was not in use before.
  virtual c10::DataPtr allocate(int64_t bytes) = 0;
  /// Starts to copy `source`, contiguous bytes of this memory from the start of an allocation, to `destination`, as many on the
  /// device; on the CPU these begin at a page, and end before the end of one that is theirs alone. Until `wait` has returned both
  /// stay, and nobody writes them.
  virtual std::unique_ptr<Fetch> fetch(const at::Tensor& source, const at::Tensor& destination) = 0;
  /// Copies `source`, as many bytes, of whole pages on the CPU, to `destination`, which begins an allocation of this memory.
  /// Returns when the CPU finds them there.
  virtual void store(const at::Tensor& source, const at::Tensor& destination) = 0;

  DelayedFailure delayed_failure;
};

/// Copies of `tensors` in `memory`, next to each other in one allocation, with the strides of those without gaps.
std::vector<at::Tensor> move_to(OffloadMemory& memory, const std::vector<at::Tensor>& tensors);

} // namespace tessera::internal
