#pragma once

#include <memory>

namespace tessera {

/// What a collective in flight still has to do. Backends implement it; users hold a `Work`.
class WorkState {
 public:
  virtual ~WorkState() = default;
  /// Blocks (CPU) or makes the current stream wait (CUDA) until the outputs are valid.
  virtual void wait() = 0;
  virtual bool is_completed() = 0;
  /// Whether `wait` blocks the host until the other ranks have called the collective. Otherwise it orders streams, and returns.
  virtual bool blocks_host() const { return true; }
};

/// Handle of an asynchronous collective. Copies share it.
///
/// The tensors given to the collective are kept alive until it completes. A default-constructed `Work` is complete.
class Work {
 public:
  Work() = default;
  explicit Work(std::shared_ptr<WorkState> state) : state_(std::move(state)) {}

  /// Blocks the calling thread (CPU tensors) or makes the current stream wait (CUDA tensors) until the output is valid.
  /// Throws c10::Error that names the collective, the rank and the cause. A second call returns at once.
  void wait() {
    if (state_) state_->wait();
    state_.reset();
  }

  /// True when `wait` would not block.
  bool is_completed() const { return !state_ || state_->is_completed(); }

  /// True when `wait` may block the calling thread until the other ranks have called the collective.
  bool blocks_host() const { return state_ && state_->blocks_host(); }

 private:
  std::shared_ptr<WorkState> state_;
};

} // namespace tessera
