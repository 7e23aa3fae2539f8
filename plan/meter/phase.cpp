#include <tessera/plan/meter/phase.h>

#include <tessera/activations/recomputation.h>
#include <tessera/base/per_thread.h>

namespace tessera::internal {

namespace {
constinit PerThread<PlanPhase> phase_of_thread; // kSetup until one is entered
} // namespace

void enter_phase(PlanPhase phase) { *phase_of_thread = phase; }

uint8_t phase_now() {
  const auto phase = *phase_of_thread;
  const bool runs_again = phase == PlanPhase::kBackward && in_second_run();
  return static_cast<uint8_t>(runs_again ? PlanPhase::kRecompute : phase);
}

} // namespace tessera::internal
