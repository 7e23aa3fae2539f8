#include <tessera/base/background_scheduling.h>

#include <sched.h>

namespace tessera::internal {

namespace {

bool set_policy(int policy) {
  const sched_param parameters = {.sched_priority = 0}; // the only one that these policies have
  return sched_setscheduler(0, policy, &parameters) == 0;
}

} // namespace

BackgroundScheduling::BackgroundScheduling() noexcept
    : changed_(sched_getscheduler(0) == SCHED_OTHER && set_policy(SCHED_BATCH)) {}

BackgroundScheduling::~BackgroundScheduling() {
  if (changed_) set_policy(SCHED_OTHER);
}

} // namespace tessera::internal
