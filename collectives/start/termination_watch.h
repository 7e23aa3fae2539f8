#pragma once

#include <atomic>
#include <functional>
#include <thread>

namespace tessera::internal {

/// Calls a function on a thread of its own at each SIGTERM, while it lives: one at a time in a process. The signal does not end
/// the process meanwhile. A handler of the program is called as well, and is in force again afterwards. Where the signal is
/// ignored, it stays so, and nothing is called.
class TerminationWatch {
 public:
  explicit TerminationWatch(std::function<void()> at_signal);
  ~TerminationWatch();
  /// Known before the function is called.
  bool has_arrived() const;
  TerminationWatch(const TerminationWatch&) = delete;
  TerminationWatch& operator=(const TerminationWatch&) = delete;

 private:
  std::function<void()> at_signal_;
  std::atomic<bool> ends_{false};
  std::thread thread_;
};

} // namespace tessera::internal
