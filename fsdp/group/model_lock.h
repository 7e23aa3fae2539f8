#pragma once

// Internal: the lock of a model, and the proof that a thread has it.

#include <c10/util/Exception.h>

#include <absl/base/thread_annotations.h>

#include <atomic>
#include <mutex>
#include <thread>
#include <utility>

namespace tessera::internal {

/// Says that the calling thread has the lock of a model. What no two threads may do at once takes one as an argument.
class Held {
 public:
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

 protected:
  Held() = default;
  ~Held() = default;
};

/// The lock of a model: the program's threads and autograd's read its parameters and bring its gradients. A thread that has it
/// may not take it again, except in a function of the program that it calls meanwhile (`ProgramCall`).
class ABSL_LOCKABLE ModelMutex {
 public:
  ModelMutex() = default;
  ModelMutex(const ModelMutex&) = delete;
  ModelMutex& operator=(const ModelMutex&) = delete;

  /// An error unless the calling thread has it.
  const Held& held() const ABSL_ASSERT_EXCLUSIVE_LOCK() {
    TORCH_INTERNAL_ASSERT(is_own(), "the lock of a model is not held");
    return held_;
  }

 private:
  friend class ModelLock;
  friend class ProgramCall;
  struct Token final : Held {};

  bool is_own() const { return owner_.load(std::memory_order_relaxed) == std::this_thread::get_id(); }

  std::mutex mutex_;
  std::atomic<std::thread::id> owner_ = {};
  const char* program_ = nullptr; // the kind of a function of the program that runs, which its owner has called
  Token held_;
};

/// Has the lock of a model in its scope.
class ABSL_SCOPED_LOCKABLE ModelLock final : public Held {
 public:
  explicit ModelLock(ModelMutex& mutex) ABSL_EXCLUSIVE_LOCK_FUNCTION(mutex) : mutex_(mutex) {
    if (mutex_.is_own()) {
      program_ = std::exchange(mutex_.program_, nullptr);
      TORCH_CHECK(program_,
                  "the lock of a model is taken twice by one thread: its hooks and extensions may use it, but not what else runs "
                  "while it computes, as communicators of the program or callbacks of operators (RecordFunction)");
    } else {
      mutex_.mutex_.lock();
      mutex_.owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    }
  }
  ~ModelLock() ABSL_UNLOCK_FUNCTION() {
    if (program_) {
      mutex_.program_ = program_;
    } else {
      mutex_.owner_.store({}, std::memory_order_relaxed);
      mutex_.mutex_.unlock();
    }
  }

  /// The kind of the function of the program in which the thread has taken the lock once more; null: it has not.
  const char* program() const { return program_; }

 private:
  ModelMutex& mutex_;
  const char* program_ = nullptr;
};

/// While it lives, a function of the program runs, as a hook or an extension, which may use the model: it takes the lock that its
/// thread has. Nothing where the thread does not have it. `kind` names the function in errors, and lives as long as the program.
class ProgramCall {
 public:
  ProgramCall(ModelMutex& mutex, const char* kind)
      : mutex_(mutex), is_own_(mutex.is_own()), before_(is_own_ ? std::exchange(mutex.program_, kind) : nullptr) {}
  ~ProgramCall() {
    if (is_own_) mutex_.program_ = before_;
  }
  ProgramCall(const ProgramCall&) = delete;
  ProgramCall& operator=(const ProgramCall&) = delete;

 private:
  ModelMutex& mutex_;
  const bool is_own_;
  const char* const before_;
};

/// A value that is reached under the lock of a model.
template <typename Value>
class Guarded {
 public:
  template <typename... Arguments>
  explicit Guarded(Arguments&&... arguments) : value_(std::forward<Arguments>(arguments)...) {}

  Value& get(const Held& /*held*/) { return value_; }
  /// While no other thread knows the value, or uses its model: as the model is made.
  Value& unshared() { return value_; }

 private:
  Value value_;
};

} // namespace tessera::internal
