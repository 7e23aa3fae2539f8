#include <tessera/training/loop/run/run_log.h>

#include <algorithm>

namespace tessera::internal {

RunLog::RunLog(const TrainerOptions& options, int64_t first_step)
    : every_(std::max<int64_t>(options.log.every, 1)), last_step_(options.stop_after.steps), log_(options.log, first_step) {
  if (!options.log.progress) return;
  bar_.emplace(last_step_);
  bar_->begin(first_step);
}

void RunLog::write(const StepEvent& event) {
  if (event.step % every_ == 0 || event.step == last_step_) log_.write(record_of(event));
  if (bar_) bar_->step(event.step, line_of(event));
}

void RunLog::finish() {
  log_.flush();
  if (bar_) bar_->finish();
}

} // namespace tessera::internal
