#include <tessera/tests/support/simulated_device/host_watch.h>

#include <utility>

namespace tessera::testing::sim {

HostWatch& HostWatch::get() {
  static auto* const watch = new HostWatch; // pinned memory may be released until the process ends
  return *watch;
}

void HostWatch::set(at::RecordFunctionCallback callback) {
  const std::lock_guard lock(mutex_);
  if (handle_) return;
  handle_ = at::addGlobalCallback(callback);
  if (!is_on_) at::disableCallback(*handle_);
}

void HostWatch::turn(bool on) {
  const std::lock_guard lock(mutex_);
  if (std::exchange(is_on_, on) == on || !handle_) return;
  on ? at::reenableCallback(*handle_) : at::disableCallback(*handle_);
}

} // namespace tessera::testing::sim
