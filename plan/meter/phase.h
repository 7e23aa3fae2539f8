#pragma once

// Internal: the part of a training step in which a thread is.

#include <cstdint>

namespace tessera::internal {

enum class PlanPhase : uint8_t { kSetup, kForward, kBackward, kRecompute, kOptimizer };

/// Changes the phase of this thread.
void enter_phase(PlanPhase phase);
/// The phase of this thread, as MetaMemory asks for it: kRecompute in a backward that runs a forward again.
uint8_t phase_now();

} // namespace tessera::internal
