#pragma once

#include <tessera/collectives/backends/simulated/cost.h>
#include <tessera/collectives/backends/simulated/operator_watch.h>
#include <tessera/collectives/simulated_time.h>

#include <array>
#include <chrono>
#include <map>
#include <mutex>
#include <vector>

namespace tessera::internal {

/// The times in which a kind of link carries bytes.
class WireTimes {
 public:
  /// Takes the first gap of so many seconds at `from` or later, and returns its end. Nothing will be asked for before `now`.
  double carry(double from, double seconds, double now);

 private:
  std::map<double, double> busy_; // from, to
};

/// A `SimulatedClock` as the communicators use it. All times are seconds on it.
class ClockState {
 public:
  ClockState(const Topology& topology, const SimulationOptions& options);

  /// While it lives the calling thread copies what a network would send: no work of the rank.
  class Pause {
   public:
    explicit Pause(ClockState& state) : state_(state) { state_.begin_pause(); }
    ~Pause() { state_.end_pause(); }
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;

   private:
    ClockState& state_;
  };

  /// Issues a collective behind those of the same communicator, which end at `stream`. Returns when it ends, and writes that
  /// there.
  double issue(const std::vector<Phase>& phases, double& stream);
  /// The rank goes on when that is over.
  void wait_until(double end);
  bool is_over(double end);
  void count_operator(const OperatorWork& work);
  void add_compute(double seconds);
  SimulatedTime elapsed();
  double flops();
  void reset();

  const Topology topology;
  const SimulationOptions options;

 private:
  using Clock = std::chrono::steady_clock;
  void begin_pause();
  void end_pause();
  /// Counts the rank's own work up to now. Called under the lock.
  void take_compute();
  /// Returns what a kernel takes.
  double seconds_of(const OperatorWork& work) const;
  /// The time at which a rank that carries its collectives itself is done with one. Called under the lock.
  double carry_alone(const std::vector<Phase>& phases);

  std::mutex mutex_;
  SimulatedTime time_;   // since the clock was made
  SimulatedTime before_; // at the last reset
  std::array<WireTimes, 2> wires_;
  double flops_ = 0, untaken_seconds_ = 0;
  Clock::time_point mark_ = Clock::now(); // up to which this process's time is taken
};

} // namespace tessera::internal
