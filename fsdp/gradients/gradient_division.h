#pragma once

// Internal: what the sum of a group's gradients over the ranks is divided by, and when.

#include <c10/core/ScalarType.h>

#include <cmath>
#include <optional>

#include <tessera/fsdp/gradients/gradient_settings.h>
#include <tessera/fsdp/layout/stages.h>

namespace tessera::internal {

struct GradientDivision {
  std::optional<double> divisor; ///< none where the collectives average
  c10::ScalarType dtype;         ///< of the sum

  bool adds() const { return divisor.has_value(); }
  /// What the gradients are divided by before they are added: a sum of fp16 numbers may be too large for it. A power of two, so
  /// that it rounds nothing, near the root of the divisor, so that neither end loses range (FSDP2).
  double early() const {
    if (!divisor || dtype != c10::kHalf || *divisor <= 1) return 1;
    return std::exp2(std::ceil(std::log2(*divisor) / 2));
  }
  double late() const { return *divisor / early(); } ///< the rest of the divisor
};

/// The program's factor, or the number of ranks where the stages cannot average `dtype` well.
inline GradientDivision division_of(const GradientSettings& settings, const Stages& stages, c10::ScalarType dtype) {
  if (settings.divide_factor || stages.averages(dtype)) return {settings.divide_factor, dtype};
  return {static_cast<double>(stages.reducing_ranks()), dtype};
}

} // namespace tessera::internal
