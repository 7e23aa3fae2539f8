#pragma once

#include <cstdint>

namespace tessera::internal {

/// Whether to write past the caches: what is written is larger than they are, and would drive out what is needed sooner.
enum class Writes { kThroughCache, kPastCache };

/// The kind of writes for a result of so many bytes.
inline Writes writes_of(int64_t bytes) { return bytes >= (int64_t{2} << 20) ? Writes::kPastCache : Writes::kThroughCache; }

/// memcpy. Past the cache it spares the read of what is overwritten, a third of the traffic.
void copy(void* to, const void* from, int64_t bytes, Writes writes);

} // namespace tessera::internal
