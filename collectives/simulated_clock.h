#pragma once

#include <tessera/collectives/simulated_time.h>
#include <tessera/collectives/topology.h>

#include <memory>

namespace tessera {

namespace internal {
class ClockState;
}

/// The modelled time of a simulated rank (`init_simulated_process_group`). The rank's own work moves it on, and so does a wait
/// for a collective that is still running then. Each communicator runs its collectives one after another, beside the rank's work
/// and those of other communicators; their bytes take turns on the links of a kind. Any thread may use it.
class SimulatedClock {
 public:
  SimulatedTime elapsed() const;
  /// Starts again from 0. Collectives that run go on: call it where none does, such as between two steps.
  void reset();
  /// Work that the clock does not see, such as a kernel of the program's own with `flops_per_second`.
  void add_compute(double seconds);
  /// Floating-point operations counted so far, with `flops_per_second`; otherwise 0.
  double flops() const;
  const Topology& topology() const;
  const SimulationOptions& options() const;

  SimulatedClock(const Topology& topology, const SimulationOptions& options);
  ~SimulatedClock();
  SimulatedClock(const SimulatedClock&) = delete;
  SimulatedClock& operator=(const SimulatedClock&) = delete;

  internal::ClockState& state() { return *state_; } ///< for communicators

 private:
  std::unique_ptr<internal::ClockState> state_;
};

} // namespace tessera
