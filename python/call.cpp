#include "call.h"

#include <ATen/core/jit_type.h>
#include <c10/core/InferenceMode.h>

#include <utility>

namespace tessera::python {

Call::Call(Work work, std::vector<at::Tensor> outputs, std::function<void()> finish, internal::CollectiveEvent::Ptr event)
    : work_(std::move(work)), outputs_(std::move(outputs)), finish_(std::move(finish)), event_(std::move(event)) {}

void Call::complete() noexcept {
  {
    std::unique_lock lock(mutex_);
    if (stage_ != Stage::kStarted) return over_.wait(lock, [this] { return stage_ == Stage::kOver; });
    stage_ = Stage::kAwaited;
  }
  std::exception_ptr failure;
  try {
    run();
  } catch (...) {
    failure = std::current_exception();
  }
  if (event_) event_->end();
  c10::intrusive_ptr<Future> future;
  {
    const std::lock_guard lock(mutex_);
    failure_ = failure;
    stage_ = Stage::kOver;
    future = future_;
  }
  over_.notify_all();
  if (future) mark(*future);
}

void Call::run() {
  work_.wait();
  if (!finish_) return;
  const c10::InferenceMode inference; // outputs may be parameters, or inference tensors
  std::exchange(finish_, nullptr)();
}

bool Call::poll() {
  {
    const std::lock_guard lock(mutex_);
    if (stage_ != Stage::kStarted || !work_.is_completed()) return stage_ == Stage::kOver;
  }
  complete();
  return true;
}

bool Call::wait_for_others(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  return over_.wait_for(lock, timeout, [this] { return stage_ == Stage::kOver; });
}

bool Call::is_over() const {
  const std::lock_guard lock(mutex_);
  return stage_ == Stage::kOver;
}

std::exception_ptr Call::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

c10::intrusive_ptr<Call::Future> Call::future() {
  bool is_over = false;
  c10::intrusive_ptr<Future> future;
  {
    const std::lock_guard lock(mutex_);
    if (future_) return future_;
    future = future_ = c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()));
    is_over = stage_ == Stage::kOver;
  }
  if (is_over) mark(*future);
  return future;
}

void Call::mark(Future& future) const {
  if (failure_) return future.setError(failure_);
  future.markCompleted(c10::IValue(outputs_));
}

} // namespace tessera::python
