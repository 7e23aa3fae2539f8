#pragma once

// Internal: a scope of a layer above that a second run of `recompute` is in, as the first one was.

#include <memory>
#include <utility>

namespace tessera::internal {

struct CarriedScope {
  CarriedScope() = default;
  virtual ~CarriedScope() = default;
  CarriedScope(const CarriedScope&) = delete;
  CarriedScope& operator=(const CarriedScope&) = delete;
};
using CarriedScopePtr = std::shared_ptr<const CarriedScope>;

/// The innermost of this thread; null outside of all.
inline thread_local CarriedScopePtr carried_scope;

/// While it lives, this thread is in a scope of another time.
class InCarriedScope {
 public:
  explicit InCarriedScope(CarriedScopePtr scope) : before_(std::exchange(carried_scope, std::move(scope))) {}
  ~InCarriedScope() { carried_scope = std::move(before_); }
  InCarriedScope(const InCarriedScope&) = delete;
  InCarriedScope& operator=(const InCarriedScope&) = delete;

 private:
  CarriedScopePtr before_;
};

} // namespace tessera::internal
