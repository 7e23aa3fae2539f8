#include <tessera/plan/meter/phase.h>

#include <tessera/activations/recomputation.h>

namespace tessera::internal {

namespace {
thread_local PlanPhase phase_of_thread = PlanPhase::kSetup;
} // namespace

void enter_phase(PlanPhase phase) { phase_of_thread = phase; }

uint8_t phase_now() {
  const bool runs_again = phase_of_thread == PlanPhase::kBackward && in_second_run();
  return static_cast<uint8_t>(runs_again ? PlanPhase::kRecompute : phase_of_thread);
}

} // namespace tessera::internal
