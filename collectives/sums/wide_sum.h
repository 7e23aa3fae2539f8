#pragma once

#include <c10/core/ScalarType.h>
#include <tessera/base/stream_copy.h>

#include <cstdint>
#include <vector>

namespace tessera::internal {

/// The most elements that one call takes: what is summed up so far stays in the first-level cache.
inline constexpr int64_t kWideBlock = 2048;

/// output[i] = (inputs[0][i] + inputs[1][i] + …) / divisor, in this order, in fp32, and rounded once: for two or more arrays of
/// fp32, bf16 or fp16, from their element `offset` on. `output` is the array's begin as well, and may be one of the inputs.
using WideSum = void (*)(void* output, const std::vector<const void*>& inputs, int64_t offset, int64_t count, float divisor,
                         Writes writes);
/// With the wide registers of this processor (AVX2); null where it has none, or for another dtype.
WideSum wide_sum_for(c10::ScalarType dtype);

} // namespace tessera::internal
