#pragma once

// What the tests of offloaded models train.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/fsdp/clip_grad.h>
#include <tessera/fsdp/no_sync.h>
#include <tessera/optim/step.h>
#include <tessera/training/grad_scaler.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/autocast.h>
#include <tessera/tests/support/lion.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing {

using OptimizerPtr = std::unique_ptr<torch::optim::Optimizer>;
using Parameters = std::vector<torch::Tensor>;

struct Training {
  Net net;
  OptimizerPtr optimizer;
};

struct Maker {
  std::string name;
  std::function<OptimizerPtr(const Parameters&)> make;
};

inline std::vector<Maker> makers() {
  register_lion();
  using namespace torch::optim; // NOLINT(google-build-using-namespace)
  return {{"SGD", [](const Parameters& all) { return std::make_unique<SGD>(all, SGDOptions(0.1).momentum(0.9)); }},
          {"AdamW", [](const Parameters& all) { return std::make_unique<AdamW>(all, AdamWOptions(0.01)); }},
          {"Lion", [](const Parameters& all) { return std::make_unique<Lion>(all, LionOptions(0.01)); }}};
}

inline torch::Tensor own_batch_on_device(int64_t number) { return own_batch(number).to(test_device()); }

/// `loss_of`, where the parameters are elsewhere than what forward reads.
inline torch::Tensor loss_on_device(Net& net, const torch::Tensor& tokens) {
  auto x = net->embed(tokens.slice(1, 0, -1));
  for (auto& block : *net->blocks) x = block->as<Block>()->forward(x);
  const auto logits = torch::matmul(net->norm(x), net->embed->weight.t());
  return torch::nn::functional::cross_entropy(logits.reshape({-1, logits.size(-1)}), tokens.slice(1, 1).reshape({-1}));
}

/// Losses of a few steps.
inline std::vector<torch::Tensor> train(Training& training, int64_t begin, int64_t end) {
  std::vector<torch::Tensor> losses;
  for (int64_t number = begin; number < end; ++number) {
    training.optimizer->zero_grad();
    const auto loss = loss_on_device(training.net, own_batch_on_device(number));
    loss.backward();
    step(*training.optimizer);
    losses.push_back(mean_over_ranks(loss));
  }
  return losses;
}

inline Training make_training(const Strategy& strategy, const Maker& maker) {
  Training training{make_net(), nullptr};
  shard_model(training.net, strategy);
  training.optimizer = maker.make(training.net->parameters());
  return training;
}

/// Whether gradients were clipped before: on the host their squares are added in double, on a device their norms in float.
enum class Clipped { kNo, kYes };

/// To the bit, but where a GPU rounds otherwise than the host, or clipping on the device.
inline void expect_same(const std::vector<torch::Tensor>& got, const std::vector<torch::Tensor>& expected,
                        Clipped clipped = Clipped::kNo) {
  ASSERT_EQ(got.size(), expected.size());
  const bool rounds_otherwise = test_device_type() == c10::kCUDA || (clipped == Clipped::kYes && !tests_the_cpu());
  for (size_t i = 0; i < got.size(); ++i) {
    if (rounds_otherwise)
      EXPECT_TENSORS_CLOSE(got[i], expected[i], 1e-4, 1e-6);
    else
      EXPECT_TENSORS_EQUAL(got[i], expected[i]);
  }
}

inline std::vector<torch::Tensor> values(const Net& net) {
  std::vector<torch::Tensor> all;
  for (const auto& parameter : net->parameters()) all.push_back(full(parameter));
  return all;
}

inline void expect_same(const Net& got, const Net& expected, Clipped clipped = Clipped::kNo) {
  expect_same(values(got), values(expected), clipped);
}

/// What a program does beside the loop: each must see the true values, and be seen.
struct Habit {
  std::string name;
  std::function<void(Training&)> run;
};

inline void accumulate(Training& each) {
  const auto batch = own_batch_on_device(18);
  {
    const auto scope = no_sync(*each.net);
    loss_on_device(each.net, batch).backward();
  }
  loss_on_device(each.net, batch).backward();
}

inline void leave_the_last_reductions(Training& each) {
  auto handle = fsdp(*each.net);
  handle.set_is_last_backward(false);
  loss_on_device(each.net, own_batch_on_device(21)).backward();
  handle.set_is_last_backward(true);
  loss_on_device(each.net, own_batch_on_device(22)).backward();
}

/// Named by tensors of the device, also where the parameter is offloaded.
inline void write_into_places(Training& each) {
  const torch::NoGradGuard no_grad;
  auto& weight = each.net->embed->weight;
  const auto index_of = [](int64_t row) { return torch::tensor({row}).to(test_device()); };
  weight.index_put_({index_of(2)}, torch::full({1, weight.size(1)}, 0.25, test_device()));
  weight.index_fill_(0, index_of(1), 0.5);
}

inline torch::Tensor autocast_loss(Training& each, const torch::Tensor& batch) {
  const AutocastScope scope;
  return loss_on_device(each.net, batch);
}

inline void step_by_a_scaler(Training& each) {
  GradScaler scaler({.init_scale = 1});
  scaler.scale(loss_on_device(each.net, own_batch_on_device(20))).backward();
  scaler.step(*each.optimizer);
}

inline std::vector<Habit> habits() {
  return {{"write a parameter",
           [](Training& each) {
             const torch::NoGradGuard no_grad;
             for (auto& parameter : each.net->parameters()) parameter.mul_(0.9);
           }},
          {"write into places of a parameter", write_into_places},
          {"write a gradient",
           [](Training& each) {
             for (const auto& parameter : each.net->parameters()) parameter.grad().mul_(0.5);
           }},
          {"zero the gradients", [](Training& each) { each.optimizer->zero_grad(/*set_to_none=*/false); }},
          {"step without the function", [](Training& each) { each.optimizer->step(); }},
          {"a second backward", [](Training& each) { loss_on_device(each.net, own_batch_on_device(17)).backward(); }},
          {"accumulate", accumulate},
          {"leave the last reductions to another backward", leave_the_last_reductions},
          {"evaluate",
           [](Training& each) {
             const torch::NoGradGuard no_grad;
             loss_on_device(each.net, global_batch(19).to(test_device()));
           }},
          {"autocast", [](Training& each) { autocast_loss(each, own_batch_on_device(23)).backward(); }},
          {"evaluate under autocast",
           [](Training& each) {
             const torch::NoGradGuard no_grad;
             autocast_loss(each, global_batch(24).to(test_device()));
           }},
          {"step by a scaler", step_by_a_scaler},
          {"step some",
           [](Training& each) {
             each.net->embed->weight.mutable_grad() = torch::Tensor();
             step(*each.optimizer);
           }},
          // Last: Adam makes much of the last bits of small gradients, from step to step.
          {"clip", [](Training& each) { clip_grad_norm_(*each.net, 0.01); }}};
}

} // namespace tessera::testing
