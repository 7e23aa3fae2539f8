#include <tessera/fsdp/gradients/gradient_division.h>

#include <cmath>

namespace tessera::internal {

double GradientDivision::early() const {
  if (!divisor || dtype != c10::kHalf || *divisor <= 1) return 1;
  return std::exp2(std::ceil(std::log2(*divisor) / 2));
}

GradientDivision division_of(const GradientSettings& settings, const Stages& stages, c10::ScalarType dtype) {
  if (settings.divide_factor || stages.averages(dtype)) return {settings.divide_factor, dtype};
  return {static_cast<double>(stages.reducing_ranks()), dtype};
}

} // namespace tessera::internal
