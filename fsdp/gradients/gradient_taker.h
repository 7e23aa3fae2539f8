#pragma once

// Internal: what takes the gradients of a group as soon as they are in grad().

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tessera::internal {

class GradientTaker {
 public:
  GradientTaker() = default;
  GradientTaker(const GradientTaker&) = delete;
  GradientTaker& operator=(const GradientTaker&) = delete;
  virtual ~GradientTaker() = default;

  /// Called with the parameters of a group whose gradients have come, in the same order on all ranks. `backward` tells one from
  /// the others.
  virtual void take(const std::vector<at::Tensor>& parameters, int64_t backward) = 0;
  /// Whether it frees the gradient of `parameter`.
  virtual bool frees(const c10::TensorImpl* parameter) const = 0;
};

} // namespace tessera::internal
