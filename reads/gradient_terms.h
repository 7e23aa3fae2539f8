#pragma once

// Internal: a mark that says that the gradients of a parameter are terms of a sum.

#include <memory>

#include <tessera/reads/kind.h>

namespace tessera::internal {

/// What a ReadMark may be besides.
struct GradientTerms {
  /// Whether the gradient of a parameter that all ranks of its mesh have may be a term of a sum over these.
  virtual bool gives_terms() const = 0;
  virtual ~GradientTerms() = default;
};

inline bool gives_terms(const std::shared_ptr<const ReadMark>& mark) {
  const auto* terms = dynamic_cast<const GradientTerms*>(mark.get());
  return terms && terms->gives_terms();
}

} // namespace tessera::internal
