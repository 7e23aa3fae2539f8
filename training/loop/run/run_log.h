#pragma once

// Internal: the log and the progress bar of a run.

#include <optional>
#include <string>

#include <tessera/training/loop/run/event_records.h>
#include <tessera/training/progress_bar.h>
#include <tessera/training/trainer_options.h>
#include <tessera/training/training_log.h>

namespace tessera::internal {

/// Writes events to the files of `LogOptions` and shows them. For the rank that writes.
class RunLog {
 public:
  RunLog(const TrainerOptions& options, int64_t first_step);

  void write(const StepEvent& event);
  template <typename Event>
  void write(const Event& event) {
    log_.write(record_of(event));
    if (bar_) bar_->line(line_of(event));
  }
  void finish();

 private:
  int64_t every_, last_step_;
  TrainingLog log_;
  std::optional<ProgressBar> bar_; ///< where progress is asked for
};

} // namespace tessera::internal
