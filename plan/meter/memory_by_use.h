#pragma once

// Internal: what a rank holds in a step, by what it is for, from the log of the meta device's memory.

#include <array>
#include <cstdint>
#include <vector>

#include <tessera/base/meta_memory.h>
#include <tessera/plan/meter/phase.h>
#include <tessera/plan/prediction.h>

namespace tessera::internal {

struct MeasuredMemory {
  PlanMemory at_peak;
  PlanPhase peak_phase = PlanPhase::kSetup;
  std::array<int64_t, 5> peak_of_phase{}; ///< bytes, by PlanPhase
  int64_t host_bytes = 0;                 ///< at most
};

struct MeterSettings {
  size_t begin = 0;          ///< the step's first event
  int64_t buffers = 0;       ///< bytes of the modules' buffers, which were made before
  bool is_offloaded = false; ///< parameters, gradients and optimizer state lie elsewhere than on the device
  int64_t granularity = 1;   ///< what the device's allocator rounds blocks up to
};

/// What is born before a step and lives in it are parameters and optimizer state. Of what is born in forward, that which lives at
/// its end are activations; in backward, gradients; in the optimizer's step, its state. All else is temporary, unless the library
/// has said what it is.
MeasuredMemory memory_by_use(const std::vector<MetaMemory::Event>& events, const MeterSettings& settings);

} // namespace tessera::internal
