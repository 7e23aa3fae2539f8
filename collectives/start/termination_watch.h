#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <thread>

namespace tessera::internal {

/// Notes each SIGTERM, while it lives: one at a time in a process. The signal does not end the process meanwhile. A handler of
/// the program is called as well, and is in force again afterwards. Where the signal is ignored, it stays so, and nothing is
/// noted.
class TerminationWatch {
 public:
  TerminationWatch();
  ~TerminationWatch();
  /// From now on each signal calls it, on a thread of the watch; so does at once, on this thread, one that has arrived before. An
  /// empty function takes the last one back, which does not run any more then.
  void call_at_signal(std::function<void()> at_signal);
  /// Known before the function is called.
  bool has_arrived() const;
  TerminationWatch(const TerminationWatch&) = delete;
  TerminationWatch& operator=(const TerminationWatch&) = delete;

 private:
  void serve();

  std::mutex mutex_;
  std::function<void()> at_signal_; ///< guarded by `mutex_`
  std::atomic<bool> ends_{false};
  std::thread thread_;
};

} // namespace tessera::internal
