#pragma once

#include <atomic>
#include <functional>
#include <thread>

namespace tessera::internal {

/// Calls a function on a thread of its own at each SIGUSR1, while it lives: one at a time in a process. Where the program, or
/// who started it, has an answer to that signal already, it keeps it, and nothing is called.
class SignalWatch {
 public:
  explicit SignalWatch(std::function<void()> at_signal);
  ~SignalWatch();
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;

 private:
  std::function<void()> at_signal_;
  std::atomic<bool> ends_{false};
  std::thread thread_;
};

} // namespace tessera::internal
