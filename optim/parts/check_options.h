#pragma once

// Internal: what the options of several optimizers must hold.

#include <c10/util/Exception.h>

#include <tuple>

namespace tessera::internal {

inline void check_not_negative(const char* optimizer, const char* option, double value) {
  TORCH_CHECK(value >= 0, optimizer, ": ", option, " is ", value, "; it must not be negative");
}

inline void check_betas(const char* optimizer, const char* option, const std::tuple<double, double>& betas) {
  const auto [beta1, beta2] = betas;
  TORCH_CHECK(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1, optimizer, ": ", option, " are ", beta1, " and ", beta2,
              "; they must be in [0, 1)");
}

} // namespace tessera::internal
