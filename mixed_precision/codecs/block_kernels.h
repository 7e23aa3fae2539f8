#pragma once

// Internal: the codes of one block on the CPU. Each kernel is written once; block_codec.cpp compiles it for the processor's
// instructions. The loops have no branches, so that they become vector instructions.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include <tessera/mixed_precision/block_codec.h>

namespace tessera::internal {

#define TESSERA_KERNEL [[gnu::always_inline]] inline

/// Rounds to the nearest integer, ties to the even one, for |value| < 2^22.
TESSERA_KERNEL float round_to_even(float value) {
  constexpr float kShift = 12582912; // 1.5 × 2^23: its last bit counts ones
  return (value + kShift) - kShift;
}

/// The float8_e4m3fn nearest to a number of at most 448 in size.
TESSERA_KERNEL uint8_t to_float8(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 24) & 0x80, size = bits & 0x7FFFFFFF;
  constexpr uint32_t kBias = (127 - 7) << 23, kSmallestNormal = (127 - 6) << 23;
  const uint32_t normal = (size - kBias + 0x7FFFF + ((size >> 20) & 1)) >> 20;
  constexpr float kShift = 16384; // 2^14: its last bit counts 2^-9, the smallest number
  const uint32_t small = std::bit_cast<uint32_t>(std::bit_cast<float>(size) + kShift) - std::bit_cast<uint32_t>(kShift);
  return static_cast<uint8_t>(sign | (size < kSmallestNormal ? small : normal));
}

TESSERA_KERNEL float from_float8(uint8_t code) {
  const float size = std::bit_cast<float>(static_cast<uint32_t>(code & 0x7F) << 20) * 0x1p120F;
  return (code & 0x80) != 0 ? -size : size;
}

/// The number that a code of a wire's `kParts` to each side stands for, before it is scaled.
TESSERA_KERNEL float quantized(float value, float scale, float parts) {
  return round_to_even(std::min(std::max(value / scale, -parts), parts));
}

/// The numbers of a block, with the residuals of before where it keeps them.
template <typename T, bool kKeeps>
struct BlockValues {
  const T* values;
  float* residual;

  TESSERA_KERNEL float operator[](int64_t i) const {
    if constexpr (kKeeps) return static_cast<float>(values[i]) + residual[i];
    return static_cast<float>(values[i]);
  }
};

/// The bits of the largest |value|: numbers that are not negative are ordered as their bits, and NaN is beyond infinity.
template <typename Values>
TESSERA_KERNEL float largest_of(const Values& values, int64_t count) {
  int32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::bit_cast<int32_t>(values[i]) & 0x7FFFFFFF);
  return std::bit_cast<float>(largest);
}

/// The mean of |value|: 16 sums of every 16th number, and the sum of these. Each is divided first, so that none is too large.
template <typename Values>
TESSERA_KERNEL float mean_of(const Values& values, int64_t count) {
  constexpr int64_t kLanes = 16;
  const float part = 1 / static_cast<float>(count);
  float sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += std::fabs(values[i + lane]) * part;
  }
  for (; i < count; ++i) sums[i % kLanes] += std::fabs(values[i]) * part;
  float sum = 0;
  for (const float each : sums) sum += each;
  return sum;
}

constexpr float parts_of(Wire wire) { return wire == Wire::kInt8 ? 127 : wire == Wire::kInt4 ? 7 : 448; }

template <Wire kWire, typename Values>
TESSERA_KERNEL float scale_of(const Values& values, int64_t count) {
  float scale = 0;
  if constexpr (kWire == Wire::kSign) {
    scale = mean_of(values, count);
  } else {
    scale = largest_of(values, count) / parts_of(kWire);
  }
  return std::isfinite(scale) ? scale : std::numeric_limits<float>::quiet_NaN();
}

/// What a code stands for.
template <Wire kWire>
TESSERA_KERNEL float number_of(const uint8_t* codes, int64_t i) {
  if constexpr (kWire == Wire::kInt8) return static_cast<float>(static_cast<int8_t>(codes[i]));
  if constexpr (kWire == Wire::kInt4) return static_cast<float>(static_cast<int32_t>((codes[i / 2] >> (4 * (i % 2))) & 0xF) - 8);
  if constexpr (kWire == Wire::kFloat8) return from_float8(codes[i]);
  return ((codes[i / 8] >> (i % 8)) & 1) != 0 ? 1.0F : -1.0F;
}

/// Writes the codes of a block whose scale is finite and not 0.
template <Wire kWire, typename Values>
TESSERA_KERNEL void write_codes(const Values& values, int64_t count, float scale, uint8_t* codes) {
  if constexpr (kWire == Wire::kInt8) {
    for (int64_t i = 0; i < count; ++i)
      codes[i] = static_cast<uint8_t>(static_cast<int32_t>(quantized(values[i], scale, parts_of(kWire))));
  } else if constexpr (kWire == Wire::kFloat8) {
    for (int64_t i = 0; i < count; ++i) codes[i] = to_float8(std::min(std::max(values[i] / scale, -448.0F), 448.0F));
  } else if constexpr (kWire == Wire::kInt4) {
    const auto code = [&](int64_t i) { return static_cast<int32_t>(quantized(values[i], scale, parts_of(kWire))) + 8; };
    for (int64_t pair = 0; pair < count / 2; ++pair)
      codes[pair] = static_cast<uint8_t>(code(2 * pair) | (code(2 * pair + 1) << 4));
    if (count % 2 == 1) codes[count / 2] = static_cast<uint8_t>(code(count - 1) | (8 << 4));
  } else {
    for (int64_t first = 0; first < count; first += 8) {
      uint32_t bits = 0;
      for (int64_t k = 0; k < std::min<int64_t>(8, count - first); ++k) bits |= (values[first + k] >= 0 ? 1U : 0U) << k;
      codes[first / 8] = static_cast<uint8_t>(bits);
    }
  }
}

/// Calls `visit` (number) for each number of a block, those of one byte as one piece of code.
template <Wire kWire, typename Visit>
TESSERA_KERNEL void for_each_number(int64_t count, const Visit& visit) {
  constexpr int64_t kNumbersAByte = kWire == Wire::kSign ? 8 : kWire == Wire::kInt4 ? 2 : 1;
  int64_t i = 0;
  for (; i + kNumbersAByte <= count; i += kNumbersAByte) {
#pragma GCC unroll 8
    for (int64_t k = 0; k < kNumbersAByte; ++k) visit(i + k);
  }
  for (; i < count; ++i) visit(i);
}

/// The code of 0, of a whole byte; any for signs.
constexpr uint8_t zero_code(Wire wire) { return wire == Wire::kInt4 ? 0x88 : 0; }

template <Wire kWire, typename T, bool kKeeps>
TESSERA_KERNEL void encode_block(const T* __restrict from, float* __restrict residual, int64_t count, float* scale,
                                 uint8_t* __restrict codes, int64_t bytes) {
  const BlockValues<T, kKeeps> values{from, residual};
  *scale = scale_of<kWire>(values, count);
  if (!(*scale > 0)) { // all are 0, or nearly, or one is not finite
    std::fill(codes, codes + bytes, zero_code(kWire));
    if (kKeeps && *scale == 0) {
      for (int64_t i = 0; i < count; ++i) residual[i] = values[i];
    }
    return;
  }
  write_codes<kWire>(values, count, *scale, codes);
  if constexpr (kKeeps) {
    const float factor = *scale;
    for_each_number<kWire>(count, [&](int64_t i) { residual[i] = values[i] - number_of<kWire>(codes, i) * factor; });
  }
}

template <Wire kWire, typename T, bool kAdds>
TESSERA_KERNEL void decode_block(float scale, const uint8_t* __restrict codes, int64_t count, T* __restrict to) {
  for_each_number<kWire>(count, [&](int64_t i) {
    const float value = number_of<kWire>(codes, i) * scale;
    if constexpr (kAdds) {
      to[i] = static_cast<T>(to[i] + static_cast<T>(value));
    } else {
      to[i] = static_cast<T>(value);
    }
  });
}

#undef TESSERA_KERNEL

} // namespace tessera::internal
