#pragma once

// Internal: what a function that is recomputed decides once, in its first run.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <vector>

#include <tessera/base/per_thread.h>

namespace tessera::internal {

/// The decisions of one recomputation, in the order of its first run.
using Decisions = std::vector<std::vector<at::Tensor>>;

/// While it lives, this thread runs a function that is recomputed: a first run adds its decisions to the list, a second one takes
/// them from it. Scopes nest as recomputations do.
class DecisionScope {
 public:
  enum class Run { kFirst, kSecond };
  DecisionScope(Decisions& decisions, Run run);

 private:
  friend std::vector<at::Tensor> decided_once(const std::function<std::vector<at::Tensor>()>& decide);
  Decisions& decisions_;
  const Run run_;
  const ScopedValue<DecisionScope*> innermost_;
  size_t next_ = 0;
};

/// What `decide` returns; in a second run of `recompute` what it returned in the first: for a choice of which the smallest
/// difference between the runs would change all that follows. The tensors need no gradient.
std::vector<at::Tensor> decided_once(const std::function<std::vector<at::Tensor>()>& decide);

} // namespace tessera::internal
