#include <tessera/base/stream_copy.h>

#include <cstddef>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace tessera::internal {

namespace {

#if defined(__SSE2__)
constexpr int64_t kLine = 64;

void copy_past_cache(char* to, const char* from, int64_t bytes) {
  const auto head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) & (kLine - 1)); // up to the next line of `to`
  std::memcpy(to, from, static_cast<size_t>(head));
  auto* target = reinterpret_cast<__m128i*>(to + head);
  const auto* source = reinterpret_cast<const __m128i*>(from + head);
  const int64_t lines = (bytes - head) / kLine;
  for (int64_t i = 0; i < lines; ++i, target += 4, source += 4) {
    const auto a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    const auto c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  _mm_sfence();
  const auto done = head + lines * kLine;
  std::memcpy(to + done, from + done, static_cast<size_t>(bytes - done));
}
#endif

} // namespace

void copy(void* to, const void* from, int64_t bytes, Writes writes) {
  if (bytes == 0 || to == from) return;
#if defined(__SSE2__)
  constexpr int64_t kWorthwhile = 4096;
  if (writes == Writes::kPastCache && bytes >= kWorthwhile)
    return copy_past_cache(static_cast<char*>(to), static_cast<const char*>(from), bytes);
#endif
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

} // namespace tessera::internal
