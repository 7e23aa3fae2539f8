#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

namespace tessera {

/// The dtypes in which a redistribution moves data (DTensor.redistribute).
struct RedistributeOptions {
  std::optional<at::ScalarType> forward_dtype;  ///< the tensor is cast to it first, and the result has it
  std::optional<at::ScalarType> backward_dtype; ///< the gradient is moved in it; the tensor's own dtype by default
};

} // namespace tessera
