#pragma once

#include <atomic>
#include <functional>
#include <thread>

namespace tessera::internal {

/// Calls a function on a thread of its own at each SIGUSR1, while it lives: one at a time in a process. Where the program, or
/// who started it, has an answer to that signal already, it keeps it, and nothing is called.
class SignalWatch {
 public:
  /// From now on the signal does not end the process. Those that come before `start` are answered then.
  SignalWatch();
  ~SignalWatch();
  void start(std::function<void()> at_signal);
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;

 private:
  bool is_taken_ = false; ///< the signal, by this watch
  std::function<void()> at_signal_;
  std::atomic<bool> ends_{false};
  std::thread thread_;
};

/// Until a watch takes it, and after that, SIGUSR1 does nothing, where it would end this process. Programs that it starts do not
/// inherit that.
void ignore_signal_without_watch();

} // namespace tessera::internal
