#pragma once

#include <cstdint>

namespace tessera {

/// Which numbers of a matrix share a scale where it is multiplied in fp8.
enum class Float8Scaling : uint8_t {
  kTensor, ///< all of them
  kRows,   ///< those that a sum of the product runs over: more exact, and more scales
};

} // namespace tessera
