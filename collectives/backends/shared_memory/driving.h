#pragma once

#include <atomic>
#include <thread>

namespace tessera::internal::shared_memory {

/// Held by the one thread of a process that moves on the calls of an engine. It never waits for another rank.
///
/// Not a mutex: one whose try_lock fails does not order what came before, which the sleepers in `Engine::sleep` rely on.
class Driving {
 public:
  enum Mode { kTry, kWait };
  Driving(std::atomic<bool>& flag, Mode mode) : flag_(flag) {
    while (!(holds_ = !flag_.exchange(true)) && mode == kWait) std::this_thread::yield();
  }
  ~Driving() {
    if (holds_) flag_.store(false);
  }
  Driving(const Driving&) = delete;
  Driving& operator=(const Driving&) = delete;
  explicit operator bool() const { return holds_; }

 private:
  std::atomic<bool>& flag_;
  bool holds_ = false;
};

} // namespace tessera::internal::shared_memory
