#pragma once

// Internal: when the actions of a step began and ended.

#include <c10/core/Device.h>

#include <chrono>
#include <string>
#include <vector>

#include <tessera/collectives/communicator.h>
#include <tessera/parallel/pipeline_schedule.h>

namespace tessera::internal::pipeline {

/// The clock of this rank's actions, which come in the order of the schedule. It begins with the step, which all ranks of the
/// pipeline begin together.
class StepTimes {
 public:
  /// The next action begins; once more where it had to wait for a message.
  void begin() { began_ = now(); }
  void end() { times_.push_back({began_, now()}); }

  /// The times of all ranks, in seconds from the first begin to the last end. Every rank of `communicator` calls it.
  PipelineSimulation gather(const PipelineSchedule& schedule, Communicator& communicator, c10::Device device) const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Time {
    double begin = 0, end = 0;
  };
  double now() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }
  std::string to_text() const;

  Clock::time_point start_ = Clock::now();
  double began_ = 0;
  std::vector<Time> times_;
};

} // namespace tessera::internal::pipeline
