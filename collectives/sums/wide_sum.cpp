#include <tessera/collectives/sums/wide_sum.h>

#if defined(__x86_64__)

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cpuid.h>
#include <immintrin.h>
#include <algorithm>
#include <array>

// The functions that hold it are called only where the processor has these instructions.
#define TESSERA_WIDE __attribute__((target("avx2,f16c")))

namespace tessera::internal {

namespace {

constexpr int64_t kLanes = 8;

TESSERA_WIDE inline __m256 load(const float* from) { return _mm256_loadu_ps(from); }

TESSERA_WIDE inline __m256 load(const c10::BFloat16* from) {
  const auto halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

TESSERA_WIDE inline __m256 load(const c10::Half* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

TESSERA_WIDE inline __m128i round_to(const c10::Half* /*type*/, __m256 values) {
  return _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// To the nearest, or to the even one of two; a NaN stays one.
TESSERA_WIDE inline __m128i round_to(const c10::BFloat16* /*type*/, __m256 values) {
  const auto bits = _mm256_castps_si256(values);
  const auto is_odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const auto rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(is_odd, _mm256_set1_epi32(0x7FFF))), 16);
  const auto is_nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
  const auto result = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), is_nan);
  const auto packed = _mm256_packus_epi32(result, result); // of each half of the register
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0b1000));
}

template <bool kPastCache>
TESSERA_WIDE inline void store(float* to, __m256 values) {
  if constexpr (kPastCache)
    _mm256_stream_ps(to, values);
  else
    _mm256_storeu_ps(to, values);
}

template <bool kPastCache, typename T>
TESSERA_WIDE inline void store(T* to, __m256 values) {
  const auto rounded = round_to(to, values);
  if constexpr (kPastCache)
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), rounded);
  else
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), rounded);
}

template <bool kPastCache, typename Output, typename A, typename B>
TESSERA_WIDE void add(Output* output, const A* a, const B* b, int64_t count, float divisor) {
  const auto divisors = _mm256_set1_ps(divisor);
  const auto add_eight = [&](Output* to, const A* x, const B* y) TESSERA_WIDE {
    const auto sum = _mm256_add_ps(load(x), load(y));
    store<kPastCache>(to, divisor == 1 ? sum : _mm256_div_ps(sum, divisors));
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) add_eight(output + i, a + i, b + i);
  if (i == count) return;
  alignas(32) std::array<Output, kLanes> last{};
  std::array<A, kLanes> last_a{};
  std::array<B, kLanes> last_b{};
  std::copy(a + i, a + count, last_a.begin());
  std::copy(b + i, b + count, last_b.begin());
  add_eight(last.data(), last_a.data(), last_b.data());
  std::copy(last.begin(), last.begin() + (count - i), output + i);
}

template <typename T, typename A>
void add_last(T* output, const A* a, const T* b, int64_t count, float divisor, Writes writes) {
  if (writes == Writes::kThroughCache || reinterpret_cast<uintptr_t>(output) % (kLanes * sizeof(T)) != 0)
    return add<false>(output, a, b, count, divisor);
  add<true>(output, a, b, count, divisor);
  _mm_sfence();
}

template <typename T>
void sum(void* output, const std::vector<const void*>& inputs, int64_t offset, int64_t count, float divisor, Writes writes) {
  const auto input = [&](size_t index) { return static_cast<const T*>(inputs[index]) + offset; };
  auto* const to = static_cast<T*>(output) + offset;
  if (inputs.size() == 2) return add_last(to, input(0), input(1), count, divisor, writes);
  alignas(64) std::array<float, kWideBlock> so_far;
  add<false>(so_far.data(), input(0), input(1), count, 1);
  for (size_t index = 2; index + 1 < inputs.size(); ++index) add<false>(so_far.data(), so_far.data(), input(index), count, 1);
  add_last(to, so_far.data(), input(inputs.size() - 1), count, divisor, writes);
}

// F16C, which not every compiler's __builtin_cpu_supports knows.
bool has_half_conversions() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

} // namespace

WideSum wide_sum_for(c10::ScalarType dtype) {
  static const bool has_instructions = __builtin_cpu_supports("avx2") && has_half_conversions();
  if (!has_instructions) return nullptr;
  switch (dtype) {
    case c10::ScalarType::Float: return &sum<float>;
    case c10::ScalarType::BFloat16: return &sum<c10::BFloat16>;
    case c10::ScalarType::Half: return &sum<c10::Half>;
    default: return nullptr;
  }
}

} // namespace tessera::internal

#else

namespace tessera::internal {

WideSum wide_sum_for(c10::ScalarType) { return nullptr; }

} // namespace tessera::internal

#endif
