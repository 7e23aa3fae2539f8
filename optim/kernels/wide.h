#pragma once

// Internal: functions that are compiled twice, once for processors with wide registers, and chosen at run time.

// What both compile goes into each.
#define TESSERA_INLINE __attribute__((always_inline))

#if defined(__x86_64__)
#define TESSERA_HAS_WIDE 1
// The functions that hold it are called only where `has_avx2`.
#define TESSERA_AVX2 __attribute__((target("avx2,fma")))
#else
#define TESSERA_HAS_WIDE 0
#endif

namespace tessera::internal {

/// Whether this processor has AVX2 and fused multiply-add.
inline bool has_avx2() {
#if TESSERA_HAS_WIDE
  static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return has;
#else
  return false;
#endif
}

} // namespace tessera::internal
