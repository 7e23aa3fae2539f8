#pragma once

// Internal: the checksum of checkpoint files, 64-bit XXH3 with seed 0.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::internal {

uint64_t checksum(const void* data, size_t bytes);
inline uint64_t checksum(std::string_view text) { return checksum(text.data(), text.size()); }

/// 16 lower-case hexadecimal digits, the most significant first.
std::string to_hex(uint64_t value);

} // namespace tessera::internal
