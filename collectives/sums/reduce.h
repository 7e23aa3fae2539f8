#pragma once

#include <c10/core/ScalarType.h>
#include <tessera/base/stream_copy.h>
#include <tessera/collectives/communicator.h>

#include <vector>

namespace tessera::internal {

/// output[i] = inputs[0][i] op inputs[1][i] op …, in this order; `output` may be one of the inputs. kAvg divides the sum by the
/// number of inputs. bf16 and fp16 are reduced in fp32 and rounded once. Arrays of `numel` elements of `dtype`.
void reduce(void* output, const std::vector<const void*>& inputs, int64_t numel, c10::ScalarType dtype, ReduceOp op,
            Writes writes = Writes::kThroughCache);

} // namespace tessera::internal
