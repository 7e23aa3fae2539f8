#pragma once

// Internal: a recomputed function whose backward comes in two halves.

#include <tessera/base/per_thread.h>

namespace tessera::internal {

/// While it lives, what a second run brings back on this thread stays for another backward, which takes it without a further run:
/// for a node that computes the gradients of an op's inputs in one backward, and those of its weights in the next.
class KeepBroughtBack {
 public:
  KeepBroughtBack();

 private:
  const ScopedValue<bool> keeps_;
};

} // namespace tessera::internal
