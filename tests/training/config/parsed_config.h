#pragma once

#include <string>

#include <tessera/training/train_config.h>

namespace tessera::testing {

/// A config with a batch, and what a test adds.
inline TrainConfig with(const std::string& keys, TrainArguments arguments = {}) {
  return TrainConfig::parse("{\"train_micro_batch_size_per_gpu\": 4, " + keys + "}", arguments, "ds.json");
}

inline TrainConfig with_zero(const std::string& keys, int64_t ranks = 8) {
  return with("\"zero_optimization\": {" + keys + "}", {.ranks = ranks});
}

} // namespace tessera::testing
