#pragma once

#include <cstdint>
#include <optional>

namespace tessera {

/// What a program knows beside its config: the ranks, and what fills the values "auto", as the arguments of Hugging Face's
/// Trainer do. What is not set fills nothing. A value that both have must be the same.
struct TrainArguments {
  int64_t ranks = 1; ///< of the job
  std::optional<int64_t> micro_batch_size, accumulation_steps;
  std::optional<double> max_grad_norm;
  std::optional<double> learning_rate, weight_decay, adam_beta1, adam_beta2, adam_epsilon;
  std::optional<int64_t> warmup_steps, total_steps;
  std::optional<bool> fp16, bf16;
};

} // namespace tessera
