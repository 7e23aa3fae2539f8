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
class PendingCopy {
 public:
  virtual ~PendingCopy() = default;
  /// Returns when what comes next finds the copy: on the device, or on the CPU where that is of this memory. Errors name what
  /// failed.
  virtual void wait() = 0;
};

/// Nothing to wait for.
class FinishedCopy final : public PendingCopy {
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
  virtual std::unique_ptr<PendingCopy> fetch(const at::Tensor& source, const at::Tensor& destination) = 0;
  /// Starts to copy `sources`, of the device, to `destinations`, which are alike and lie in one allocation of this memory. Null
  /// where that has ended. Throws what this memory cannot do; an error of the device is thrown by `wait`.
  virtual std::unique_ptr<PendingCopy> store(const std::vector<at::Tensor>& sources,
                                             const std::vector<at::Tensor>& destinations) = 0;

  virtual DelayedFailure& delayed_failure() { return delayed_failure_; }

 private:
  DelayedFailure delayed_failure_;
};

struct MovedTensors {
  std::vector<at::Tensor> tensors;
  std::unique_ptr<PendingCopy> copy; ///< of their values; null where these are there
};

/// Starts to copy `tensors` to `memory`, next to each other in one allocation, with the strides of those without gaps.
MovedTensors start_move(OffloadMemory& memory, const std::vector<at::Tensor>& tensors);
/// The same, and waits for the values.
std::vector<at::Tensor> move_to(OffloadMemory& memory, const std::vector<at::Tensor>& tensors);

} // namespace tessera::internal
