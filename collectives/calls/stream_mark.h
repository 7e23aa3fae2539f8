#pragma once

#include <c10/core/Stream.h>

#include <tessera/collectives/work.h>

namespace tessera::internal {

/// All that the stream holds so far. The `wait` of the Work makes the calling thread's current stream wait for that, and blocks
/// no host; a copy of the Work may wait for it on another stream.
Work mark(const c10::Stream& stream);

} // namespace tessera::internal
