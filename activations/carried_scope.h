#pragma once

// Internal: a scope of a layer above that a second run of `recompute` is in, as the first one was.

#include <memory>

namespace tessera::internal {

struct CarriedScope {
  CarriedScope() = default;
  virtual ~CarriedScope() = default;
  CarriedScope(const CarriedScope&) = delete;
  CarriedScope& operator=(const CarriedScope&) = delete;
};
using CarriedScopePtr = std::shared_ptr<const CarriedScope>;

} // namespace tessera::internal
