#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <tessera/optim/state_value.h>

namespace tessera {

/// What a checkpoint holds, by name.
struct SavedState {
  struct Tensor {
    at::ScalarType dtype;
    std::vector<int64_t> sizes; ///< global shape
  };
  std::map<std::string, Tensor> tensors;
  std::map<std::string, StateValue> values;
};

} // namespace tessera
