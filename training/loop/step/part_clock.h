#pragma once

// Internal: how long the parts of a step take.

#include <c10/core/Device.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>

namespace tessera::internal {

class PartClock {
 public:
  /// One that is not `on` measures nothing.
  PartClock(bool on, c10::Device device) : on_(on), device_(device) {}

  void start() {
    if (on_) last_ = now();
  }
  /// Adds the seconds since the last call, with the device's work until now.
  void add_to(double& seconds) {
    if (!on_) return;
    const auto time = now();
    seconds += std::chrono::duration<double>(time - last_).count();
    last_ = time;
  }

 private:
  using Clock = std::chrono::steady_clock;

  Clock::time_point now() const {
    if (!device_.is_cpu()) c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
    return Clock::now();
  }

  bool on_;
  c10::Device device_;
  Clock::time_point last_;
};

} // namespace tessera::internal
