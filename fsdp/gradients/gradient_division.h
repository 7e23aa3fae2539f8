#pragma once

// Internal: what the sum of a group's gradients over the ranks is divided by, and when.

#include <c10/core/ScalarType.h>

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
  double early() const;
  double late() const { return *divisor / early(); } ///< the rest of the divisor
};

/// The program's factor, or the number of ranks where the stages cannot average `dtype` well.
GradientDivision division_of(const GradientSettings& settings, const Stages& stages, c10::ScalarType dtype);

} // namespace tessera::internal
