#pragma once

// SmallGpt trained for some steps on rows of unequal length, for comparisons with one process.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <vector>

#include <tessera/dtensor/api.h>
#include <tessera/mesh/device_mesh.h>

#include <tessera/tests/parallel/small_gpt.h>
#include <tessera/tests/support/test_device.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing {

inline constexpr int64_t kRows = 12, kLength = 21, kIgnored = -100;

/// The same on every rank: tokens [rows, length], of which the first rows are shorter, with labels.
struct Rows {
  explicit Rows(int64_t step) {
    torch::manual_seed(500 + step);
    tokens = torch::randint(0, 29, {kRows, kLength}, torch::kLong);
    labels = torch::cat({tokens.slice(1, 1), torch::full({kRows, 1}, kIgnored, torch::kLong)}, 1);
    for (int64_t row = 0; row < kRows / 2; ++row) labels[row].slice(0, kLength - 3 * row).fill_(kIgnored);
  }
  double valid() const { return static_cast<double>(labels.ne(kIgnored).sum().item<int64_t>()); }
  torch::Tensor tokens, labels;
};

inline torch::Tensor sum_of_losses(const torch::Tensor& logits, const torch::Tensor& labels) {
  return torch::cross_entropy_loss(logits.flatten(0, 1).to(torch::kFloat), labels.flatten(), {}, at::Reduction::Sum, kIgnored);
}

inline torch::Tensor loss_of_whole(SmallGpt& gpt, const Rows& rows) {
  return sum_of_losses(gpt->forward(rows.tokens, torch::arange(kLength)), rows.labels) / rows.valid();
}

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<torch::Tensor>&)>;

inline std::unique_ptr<torch::optim::Optimizer> sgd(const std::vector<torch::Tensor>& parameters) {
  return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.3).momentum(0.9));
}
inline std::unique_ptr<torch::optim::Optimizer> adamw(const std::vector<torch::Tensor>& parameters) {
  return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(0.01));
}

/// The sum of a number over all ranks.
inline double sum_over_ranks(const torch::Tensor& value) {
  const auto mesh = init_device_mesh(test_device_type(), {world_size()}, {"world"});
  auto sum = value.detach().clone().reshape({1});
  mesh.communicator(0)->all_reduce(sum, ReduceOp::kSum, "loss").wait();
  return sum.item<double>();
}

struct TrainedGpt {
  std::vector<double> losses;
  std::vector<torch::Tensor> weights;
};

struct GptTraining {
  MakeOptimizer optimizer = sgd;
  int64_t steps = 20;
};

/// Steps with clipping. `loss_of(rows)` is of what this rank has of a batch, `number(loss)` the loss of the batch.
inline TrainedGpt train(SmallGpt& gpt, const GptTraining& training, const std::function<torch::Tensor(const Rows&)>& loss_of,
                        const std::function<double(const torch::Tensor&)>& number) {
  const torch::AutoGradMode grad_mode(true);
  TrainedGpt trained;
  const auto optimizer = training.optimizer(gpt->parameters());
  for (int64_t step = 0; step < training.steps; ++step) {
    const Rows rows(step);
    optimizer->zero_grad();
    const auto loss = loss_of(rows);
    loss.backward();
    torch::nn::utils::clip_grad_norm_(gpt->parameters(), 0.3);
    optimizer->step();
    trained.losses.push_back(number(loss));
  }
  const torch::NoGradGuard no_grad;
  for (const auto& parameter : gpt->parameters())
    trained.weights.push_back((is_dtensor(parameter) ? DTensor(parameter).full_tensor() : parameter.detach()).cpu());
  return trained;
}

inline double item(const torch::Tensor& loss) { return loss.item<double>(); }

inline void expect_close(const TrainedGpt& got, const TrainedGpt& expected, double bound) {
  ASSERT_EQ(got.weights.size(), expected.weights.size());
  for (size_t i = 0; i < got.losses.size(); ++i) EXPECT_NEAR(got.losses[i], expected.losses[i], bound) << "step " << i;
  for (size_t i = 0; i < got.weights.size(); ++i)
    EXPECT_LE((got.weights[i] - expected.weights[i]).abs().max().item<double>(), bound) << "parameter " << i;
}

} // namespace tessera::testing
