// The phases of micro-batches, as the program says them.

#include <tessera/fsdp/schedule/schedule.h>

#include <ATen/core/grad_mode.h>

#include <tessera/fsdp/schedule/graph_task.h>

namespace tessera::internal {

std::string Schedule::refusal_of(const MicroBatch& phase) {
  const std::lock_guard lock(mutex_);
  forget_failed_backward();
  return step_.micro_batches().refusal(phase, at::GradMode::is_enabled());
}

void Schedule::begin_phase(const MicroBatch& phase) {
  const std::lock_guard lock(mutex_);
  step_.begin_phase(phase, at::GradMode::is_enabled());
}

void Schedule::end_phase(bool has_failed) {
  {
    const std::lock_guard lock(mutex_);
    if (has_failed_backward()) abandon_backward();
    if (has_failed || !step_.micro_batches().lacks_backward()) return step_.end_phase(has_failed);
  }
  try {
    run_empty_backward([this] { // not under the lock: it ends with the user's hooks, perhaps on another thread
      const std::lock_guard lock(mutex_);
      follow();
    });
  } catch (...) {
    end_phase(/*has_failed=*/true);
    throw;
  }
  const std::lock_guard lock(mutex_);
  step_.end_phase(/*has_failed=*/false);
}

void Schedule::expect_phase(MicroBatchPhase phase) {
  const std::lock_guard lock(mutex_);
  forget_failed_backward();
  if (!step_.is_in_backward()) step_.expect_phase(phase);
}

void Schedule::give_up_micro_batches() {
  const std::lock_guard lock(mutex_);
  step_.give_up_micro_batches();
}

} // namespace tessera::internal
