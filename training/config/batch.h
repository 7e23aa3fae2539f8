#pragma once

// Internal: the arithmetic of a batch.

#include <cstdint>
#include <optional>
#include <string>

#include <tessera/training/train_config.h>

namespace tessera::internal {

/// What a file gives of a batch.
struct GivenBatch {
  std::optional<int64_t> train, micro, accumulation;
};

/// train = micro × accumulation × ranks, what is not given computed as DeepSpeed does. `ranks` have different data. Errors name
/// `source`: neither train nor micro given; a number that is not positive; numbers that do not fit, with those that do.
BatchConfig complete_batch(const GivenBatch& given, int64_t ranks, const std::string& source);

} // namespace tessera::internal
