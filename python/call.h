#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <tessera/collectives/calls/collective_event.h>
#include <tessera/collectives/work.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <vector>

namespace tessera::python {

/// A collective in flight with what follows it: the copies to tensors that it could not write itself, and its Future.
class Call {
 public:
  using Future = c10::ivalue::Future;

  /// `finish` runs once, on the thread that sees the end of `work`; it may be empty. `event`, which may be null, ends after it.
  Call(Work work, std::vector<at::Tensor> outputs, std::function<void()> finish, internal::CollectiveEvent::Ptr event = nullptr);

  /// Blocks until it is over, with its result or its failure. Any thread, any number of times.
  void complete() noexcept;
  /// As `complete`, where that does not block; whether it is over.
  bool poll();
  /// Waits for another thread to complete it; whether it is over.
  bool wait_for_others(std::chrono::milliseconds timeout);

  bool is_over() const;
  std::exception_ptr failure() const; ///< null while it is not over
  const std::vector<at::Tensor>& outputs() const { return outputs_; }
  /// Of the list of outputs. Somebody has to call `complete`.
  c10::intrusive_ptr<Future> future();

 private:
  enum class Stage { kStarted, kAwaited, kOver };

  void run();
  void mark(Future& future) const;

  Work work_;
  std::vector<at::Tensor> outputs_;
  std::function<void()> finish_;
  internal::CollectiveEvent::Ptr event_;
  mutable std::mutex mutex_;
  std::condition_variable over_;
  Stage stage_ = Stage::kStarted;
  std::exception_ptr failure_;
  c10::intrusive_ptr<Future> future_;
};

} // namespace tessera::python
