#pragma once

// Internal: the reductions of a model that are in flight.

#include <vector>

#include <tessera/fsdp/scheduled_group.h>

namespace tessera::internal {

/// At most one reduce-scatter and one all-reduce are in flight. Collective: every rank starts the same reductions in one order.
class ReductionQueue {
 public:
  /// Starts the reduction of a group, when those before it have ended: all, or all but one where there are two collectives.
  void start(ScheduledGroup& entry, ReadyGradients& ready);
  void finish(ReadyGradients& ready);
  /// Forgets them, after a failed backward.
  void drop() { reducing_.clear(); }

 private:
  std::vector<ScheduledGroup*> reducing_;
};

} // namespace tessera::internal
