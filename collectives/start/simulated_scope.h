#pragma once

#include <tessera/collectives/process_context.h>
#include <tessera/collectives/start/thread_context.h>

#include <memory>

namespace tessera::internal {

/// While it lives, the calling thread is a rank of a simulated group, and so is every backward on the meta device that is called
/// in it. The process's group, if there is one, is left alone.
class SimulatedScope {
 public:
  SimulatedScope(const Topology& topology, int rank, const SimulationOptions& options)
      : guard_(enter_context(make_simulated_context(topology, rank, options))) {}
  SimulatedScope(const SimulatedScope&) = delete;
  SimulatedScope& operator=(const SimulatedScope&) = delete;

 private:
  c10::DebugInfoGuard guard_;
};

} // namespace tessera::internal
