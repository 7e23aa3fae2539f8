#pragma once

// Internal: lists of tensors for ATen's fused optimizers.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace tessera::internal {

/// One parameter of a fused step, with what belongs to it: its gradient, its moments.
struct FusedEntry {
  std::vector<at::Tensor> tensors; ///< the parameter, its gradient, and what is kept of it; of one dtype and device
  int64_t step = 0;                ///< the number of the step that is taken, from 1
};

/// The lists that one call of a fused operator takes: `tensors[k]` holds the k-th tensor of all entries.
struct FusedLists {
  std::vector<std::vector<at::Tensor>> tensors;
  std::vector<at::Tensor> steps; ///< without dims, float, on the parameters' device
};

/// Calls `step` for the entries of each dtype, device and number of tensors, DTensors and plain ones apart, in the order in which
/// they first appear.
void for_each_fused_list(const std::vector<FusedEntry>& entries, const std::function<void(FusedLists&)>& step);

/// The settings of a fused step of Adam's kind.
struct FusedAdamSettings {
  double lr, beta1, beta2, eps, weight_decay;
  bool amsgrad;
  bool decoupled; ///< weight decay as AdamW's
};

/// Steps entries of {parameter, gradient, exp_avg, exp_avg_sq} and, under amsgrad, max_exp_avg_sq.
void fused_adam_step(const std::vector<FusedEntry>& entries, const FusedAdamSettings& settings);

} // namespace tessera::internal
