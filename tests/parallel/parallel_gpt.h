#pragma once

// The GPT of the examples beside one process, under a plan of tensor parallelism.

#include <torch/torch.h>

#include <gpt/model.h>
#include <gpt/sharding.h>
#include <tessera/dtensor/api.h>
#include <tessera/parallel/parallelize.h>

#include <tessera/tests/support/test_device.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing {

/// 12 heads, which 1 to 4 ranks divide.
inline gpt::ModelConfig small_gpt(int64_t layers = 2) {
  gpt::ModelConfig config;
  config.layers = layers;
  config.width = 48;
  config.heads = 12;
  config.sequence = 16;
  return config;
}

inline gpt::Gpt seeded_gpt(const gpt::ModelConfig& config) {
  torch::manual_seed(3);
  gpt::Gpt model(config);
  torch::NoGradGuard no_grad;
  for (auto& item : model->named_parameters()) { // biases of zero hide a sum over the ranks
    if (item.value().dim() == 1) item.value().add_(torch::randn_like(item.value()), 0.1);
  }
  return model;
}

/// Megatron's plan.
inline ParallelPlan gpt_plan(bool sequence = false) { return gpt::parallel_plan(sequence, /*has_experts=*/false); }

struct Tokens {
  torch::Tensor inputs, targets; ///< [batch, time]
};

inline Tokens draw_tokens(int64_t step, int64_t batch, int64_t time) {
  torch::manual_seed(100 + step);
  const auto tokens = torch::randint(gpt::kVocabulary, {batch, time + 1}, torch::kLong);
  return {tokens.slice(1, 0, time).contiguous(), tokens.slice(1, 1).contiguous()};
}

inline torch::Tensor whole_of(const torch::Tensor& tensor) {
  const torch::NoGradGuard no_grad;
  return is_dtensor(tensor) ? DTensor(tensor.detach()).full_tensor() : tensor.detach();
}

} // namespace tessera::testing
