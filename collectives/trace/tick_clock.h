#pragma once

#include <c10/util/ApproximateClock.h>

#include <cstdint>

namespace tessera::internal {

/// A reading of the processor's counter, where it has one that can be read in a few nanoseconds. 0: none.
using Ticks = int64_t;

inline Ticks now_in_ticks() { return static_cast<Ticks>(c10::getApproximateTime()); }

/// A moment on the counter and on the clocks of the system (nanoseconds).
struct Moment {
  Ticks ticks = 0;
  int64_t steady = 0, since_epoch = 0;

  static Moment now();
};

/// Nanoseconds since the epoch of what was read between two moments. The steady clock gives the length of a tick, so that no
/// adjustment of the date in between stretches it.
int64_t since_epoch(Ticks ticks, const Moment& first, const Moment& last);

} // namespace tessera::internal
