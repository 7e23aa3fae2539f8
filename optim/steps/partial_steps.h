#pragma once

// Internal: a step of an optimizer that is taken in parts.

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <optional>
#include <vector>

#include <tessera/optim/parts/own_values.h>

namespace tessera::internal {

/// Steps of some of an optimizer's parameters at a time. For an optimizer that updates one parameter at a time they equal a step
/// over all at once.
class PartialSteps {
 public:
  /// Errors: an optimizer of a class that `register_optimizer` does not know, and one that computes with all parameters together.
  explicit PartialSteps(torch::optim::Optimizer& optimizer);

  /// Steps those of `parameters` that have a gradient, as `tessera::step` does. Steps of one `round` count as one of the
  /// optimizer: each finds its registered values as the first did.
  void step(const std::vector<at::Tensor>& parameters, int64_t round);
  torch::optim::Optimizer& optimizer() const { return optimizer_; }

 private:
  torch::optim::Optimizer& optimizer_;
  const OptimizerClass& class_;
  std::optional<int64_t> round_;
  std::optional<OwnValues> before_; ///< the values before the round
};

} // namespace tessera::internal
