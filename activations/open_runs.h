#pragma once

// Internal: the runs of recomputed functions that a thread is in.

#include <cstdint>

#include <tessera/activations/carried_scope.h>
#include <tessera/base/per_thread.h>

namespace tessera::internal {

class DecisionScope;
class KeptResultsScope;

/// What holds on a thread because of them. Each member is a `ScopedValue` of the scope that its comment names.
struct OpenRuns {
  struct Second {
    uint64_t outermost = 0; ///< the number of the outermost recomputation that is in its second run, from 1; 0: none
    int64_t task = -1;      ///< the backward that asked for it
  };

  uint64_t outermost = 0;              ///< the number of the outermost that is in its first run or second; 0: none (RunScope)
  Second second;                       ///< (RunScope)
  KeptResultsScope* results = nullptr; ///< null: no operator's result is kept or given (KeptResultsScope)
  DecisionScope* decisions = nullptr;  ///< the innermost (DecisionScope)
  bool keeps_brought_back = false;     ///< (KeepBroughtBack)
  /// A scope of a layer above, in which a second run is as the first one was (ContextParallelScope); null outside of all.
  CarriedScopePtr carried;
};
inline constinit PerThread<OpenRuns> open_runs;

} // namespace tessera::internal
