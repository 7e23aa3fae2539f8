// The phases of micro-batches, as the program says them.

#include <tessera/fsdp/schedule/schedule.h>

#include <ATen/core/grad_mode.h>

#include <tessera/fsdp/schedule/graph_task.h>

namespace tessera::internal {

std::string Schedule::refusal_of(const MicroBatch& phase) {
  const ModelLock lock(mutex_);
  if (has_failed_backward()) abandon_backward();
  return step_.micro_batches().refusal(phase, at::GradMode::is_enabled());
}

void Schedule::begin_phase(const MicroBatch& phase) {
  const ModelLock lock(mutex_);
  step_.begin_phase(phase, at::GradMode::is_enabled());
}

void Schedule::end_phase(bool has_failed) {
  {
    const ModelLock lock(mutex_);
    if (has_failed_backward()) abandon_backward();
    if (has_failed || !step_.micro_batches().lacks_backward()) return step_.end_phase(has_failed);
  }
  try {
    run_empty_backward([this] { // it ends with the user's hooks, perhaps on another thread
      const ModelLock lock(mutex_);
      follow();
    });
  } catch (...) {
    end_phase(/*has_failed=*/true);
    throw;
  }
  const ModelLock lock(mutex_);
  step_.end_phase(/*has_failed=*/false);
}

void Schedule::expect_phase(MicroBatchPhase phase) {
  const ModelLock lock(mutex_);
  if (has_failed_backward()) abandon_backward();
  if (!step_.is_in_backward()) step_.expect_phase(phase);
}

void Schedule::give_up_micro_batches() {
  const ModelLock lock(mutex_);
  step_.give_up_micro_batches();
}

} // namespace tessera::internal
