#include <tessera/checkpoint/checksum.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace tessera::checkpoint {

uint64_t checksum(const void* data, size_t bytes) { return XXH3_64bits(data, bytes); }

std::string to_hex(uint64_t value) {
  std::string text(16, '0');
  for (size_t i = 0; i < text.size(); ++i) text[text.size() - 1 - i] = "0123456789abcdef"[(value >> (4 * i)) & 15];
  return text;
}

} // namespace tessera::checkpoint
