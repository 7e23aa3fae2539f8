#include <fmt/format.h>
#include <tessera/checkpoint/bytes/checksum.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace tessera::internal {

uint64_t checksum(const void* data, size_t bytes) { return XXH3_64bits(data, bytes); }

std::string to_hex(uint64_t value) { return fmt::format("{:016x}", value); }

} // namespace tessera::internal
