// Backwards in two halves beside plain ones: bitwise the same gradients.
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/activations/recompute.h>
#include <tessera/activations/saved_tensors.h>
#include <tessera/dtensor/api.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/nn/float8_linear.h>
#include <tessera/nn/sync_batch_norm.h>
#include <tessera/parallel/backward/split_backward.h>

#include <tessera/tests/parallel/small_gpt.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/world.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace tessera::testing::split_backward_test {
namespace {

using internal::pipeline::SplitBackward, internal::pipeline::WeightQueue;
using Forward = std::function<torch::Tensor(const torch::Tensor&)>;

constexpr int64_t kWidth = 24;

struct Case {
  std::string name;
  std::shared_ptr<torch::nn::Module> module;
  Forward forward;
  std::vector<int64_t> input = {2, 6, kWidth};
  size_t split_ops = 0; ///< at least
};

struct Gradients {
  std::map<std::string, torch::Tensor> of_parameters;
  std::vector<torch::Tensor> of_inputs;
  size_t split_ops = 0;
};

torch::Tensor local_of(const torch::Tensor& tensor) { return is_dtensor(tensor) ? DTensor(tensor).local() : tensor; }

/// Three micro-batches, whose second halves follow all first ones. `before` is called before each backward with whether it is the
/// last one.
Gradients run(
    const Case& each, bool splits, const std::function<void(bool)>& before = [](bool) {}) {
  constexpr int64_t kBatches = 3;
  each.module->zero_grad();
  Gradients gradients;
  std::vector<std::shared_ptr<WeightQueue>> queues;
  for (int64_t i = 0; i < kBatches; ++i) {
    torch::manual_seed(50 + i);
    const auto leaf = torch::randn(each.input).requires_grad_();
    const auto x = leaf.clone(); // which is no weight
    queues.push_back(std::make_shared<WeightQueue>());
    torch::Tensor out;
    {
      std::optional<SplitBackward> scope;
      if (splits) scope.emplace(queues.back());
      out = each.forward(x);
    }
    gradients.split_ops = queues.back()->expected();
    before(!splits && i == kBatches - 1);
    out.backward(torch::cos(out.detach()));
    gradients.of_inputs.push_back(leaf.grad());
  }
  for (int64_t i = 0; i < kBatches && splits; ++i) {
    before(i == kBatches - 1);
    queues[static_cast<size_t>(i)]->run();
  }
  for (const auto& item : each.module->named_parameters()) {
    if (item.value().grad().defined()) gradients.of_parameters[item.key()] = local_of(item.value().grad()).clone();
  }
  return gradients;
}

void expect_same(const Gradients& split, const Gradients& plain) {
  ASSERT_EQ(split.of_parameters.size(), plain.of_parameters.size());
  for (const auto& [name, gradient] : plain.of_parameters) EXPECT_TENSORS_EQUAL(split.of_parameters.at(name), gradient) << name;
  for (size_t i = 0; i < plain.of_inputs.size(); ++i) EXPECT_TENSORS_EQUAL(split.of_inputs[i], plain.of_inputs[i]) << i;
}

void expect_bitwise(const Case& each) {
  SCOPED_TRACE(each.name);
  const auto plain = run(each, false), split = run(each, true);
  EXPECT_GE(split.split_ops, each.split_ops);
  expect_same(split, plain);
}

std::shared_ptr<GptBlockImpl> block() {
  torch::manual_seed(1);
  return std::make_shared<GptBlockImpl>(kWidth, 4, 2);
}

torch::Tensor in_bfloat16(const Forward& forward, const torch::Tensor& x) {
  at::autocast::set_autocast_enabled(at::kCPU, true);
  auto out = forward(x);
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  return out.to(torch::kFloat);
}

std::vector<Case> blocks() {
  std::vector<Case> cases;
  const auto one = block();
  const auto forward = [one](const torch::Tensor& x) { return one->forward(x); };
  cases.push_back({"a block", one, forward, {2, 6, kWidth}, 5});
  cases.push_back({"twice", one, [forward](const torch::Tensor& x) { return forward(forward(x)); }, {2, 6, kWidth}, 10});
  cases.push_back({"three times", one, [forward](const torch::Tensor& x) { return forward(forward(forward(x))); }});
  cases.push_back({"recomputed", one, [one](const torch::Tensor& x) { return recompute(*one, x); }, {2, 6, kWidth}, 5});
  cases.push_back({"recomputed twice", one, [one](const torch::Tensor& x) {
                     return recompute([one](const torch::Tensor& y) { return recompute(*one, recompute(*one, y)); }, x);
                   }});
  cases.push_back({"autocast", one, [forward](const torch::Tensor& x) { return in_bfloat16(forward, x); }, {2, 6, kWidth}, 5});
  cases.push_back({"no rows", one, forward, {0, 6, kWidth}});
  cases.push_back({"one element", one, forward, {1, 1, kWidth}});
  return cases;
}

/// Products in fp8 have a node of their own.
std::vector<Case> in_float8() {
  std::vector<Case> cases;
  for (const auto scaling : {Float8Scaling::kTensor, Float8Scaling::kRows}) {
    const auto one = block(), few = block();
    for (const auto& each : {one, few}) convert_to_float8(*each, {.scaling = scaling});
    const auto forward = [one](const torch::Tensor& x) { return one->forward(x); };
    cases.push_back({"fp8", one, forward, {2, 6, kWidth}, 5});
    cases.push_back({"fp8 twice", one, [forward](const torch::Tensor& x) { return forward(forward(x)); }, {2, 6, kWidth}, 10});
    cases.push_back({"fp8 recomputed", one, [one](const torch::Tensor& x) { return recompute(*one, x); }, {2, 6, kWidth}, 5});
    cases.push_back(
        {"fp8 autocast", one, [forward](const torch::Tensor& x) { return in_bfloat16(forward, x); }, {2, 6, kWidth}, 5});
    cases.push_back({"fp8 without rows", one, forward, {0, 6, kWidth}, 5});
    for (auto& each : few->parameters()) each.set_requires_grad(false);
    for (const auto& item : few->named_parameters()) {
      if (item.key() == "up.weight") item.value().set_requires_grad(true);
    }
    cases.push_back({"one fp8 weight", few, [few](const torch::Tensor& x) { return few->forward(x); }, {2, 6, kWidth}, 1});
  }
  return cases;
}

/// What is saved lies elsewhere, and is brought back in each half that needs it.
std::vector<Case> kept_elsewhere() {
  const TensorPlace copies = [](const torch::Tensor& tensor) { return [copy = tensor.clone()] { return copy.clone(); }; };
  std::vector<Case> cases;
  const auto one = block(), coded = block();
  convert_to_float8(*coded);
  for (const auto& each : {one, coded}) {
    cases.push_back({"kept elsewhere",
                     each,
                     [=](const torch::Tensor& x) {
                       const auto scope = saved_tensors_in(copies);
                       return each->forward(x);
                     },
                     {2, 6, kWidth},
                     5});
    cases.push_back({"kept elsewhere and recomputed",
                     each,
                     [=](const torch::Tensor& x) {
                       const auto scope = saved_tensors_in(copies);
                       return recompute(*each, x);
                     },
                     {2, 6, kWidth},
                     5});
  }
  return cases;
}

std::vector<Case> frozen() {
  std::vector<Case> cases;
  const auto most = block(), few = block();
  most->query->weight.set_requires_grad(false);
  cases.push_back({"a frozen weight", most, [most](const torch::Tensor& x) { return most->forward(x); }, {2, 6, kWidth}, 4});
  for (auto& each : few->parameters()) each.set_requires_grad(false);
  few->up->weight.set_requires_grad(true);
  cases.push_back({"one weight", few, [few](const torch::Tensor& x) { return few->forward(x); }, {2, 6, kWidth}, 1});
  return cases;
}

struct ScaledImpl : torch::nn::Module {
  ScaledImpl()
      : linear(register_module("linear", torch::nn::Linear(kWidth, kWidth))),
        scale(register_parameter("scale", torch::randn({kWidth}))),
        query(register_parameter("query", torch::randn({1, 1, kWidth}))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    const auto y = torch::ones({2, 6, kWidth}) * scale; // an activation that leads to parameters alone
    const auto z = query.expand({2, 6, kWidth});
    return x + y + linear(y) + z + linear(z) + torch::matmul(x, linear->weight.t().contiguous());
  }
  torch::nn::Linear linear;
  torch::Tensor scale, query;
};

std::vector<Case> modules() {
  using namespace torch::nn; // NOLINT(google-build-using-namespace)
  std::vector<Case> cases;
  torch::manual_seed(2);
  Sequential layers(Conv2d(Conv2dOptions(3, 8, 3).padding(1)), BatchNorm2d(8), ReLU(ReLUOptions(true)),
                    Conv2d(Conv2dOptions(8, 8, 3).groups(2).stride(2).bias(false)), ConvTranspose2d(8, 4, 2), Flatten(),
                    Linear(4 * 64, 10));
  cases.push_back(
      {"convolutions", layers.ptr(), [layers](const torch::Tensor& x) mutable { return layers->forward(x); }, {4, 3, 16, 16}, 4});
  LSTM lstm(LSTMOptions(8, 8).num_layers(2));
  cases.push_back(
      {"LSTM", lstm.ptr(), [lstm](const torch::Tensor& x) mutable { return std::get<0>(lstm->forward(x)); }, {5, 2, 8}});
  GRU gru(GRUOptions(8, 8));
  cases.push_back({"GRU", gru.ptr(), [gru](const torch::Tensor& x) mutable { return std::get<0>(gru->forward(x)); }, {5, 2, 8}});
  TransformerEncoder encoder(TransformerEncoderOptions(TransformerEncoderLayerOptions(16, 2).dim_feedforward(32), 2));
  cases.push_back({"TransformerEncoder with dropout",
                   encoder.ptr(),
                   [encoder](const torch::Tensor& x) mutable { return encoder->forward(x); },
                   {6, 2, 16},
                   6});
  MultiheadAttention attention(MultiheadAttentionOptions(16, 2));
  cases.push_back({"MultiheadAttention",
                   attention.ptr(),
                   [attention](const torch::Tensor& x) mutable { return std::get<0>(attention->forward(x, x, x)); },
                   {6, 2, 16},
                   2});
  Bilinear bilinear(4, 4, 3);
  cases.push_back(
      {"Bilinear", bilinear.ptr(), [bilinear](const torch::Tensor& x) mutable { return bilinear->forward(x, x); }, {6, 4}});
  return cases;
}

/// Its statistics come from all ranks, through the dispatch key that split ops have too.
Case synchronized() {
  using namespace torch::nn; // NOLINT(google-build-using-namespace)
  torch::manual_seed(4);
  Sequential layers(Conv2d(Conv2dOptions(3, 8, 3).padding(1)), BatchNorm2d(8), ReLU(), Conv2d(Conv2dOptions(8, 4, 3)), Flatten(),
                    Linear(4 * 196, 5));
  const auto mesh = init_device_mesh(torch::kCPU, {world_size()});
  EXPECT_EQ(convert_sync_batch_norm(*layers, mesh).size(), 1U);
  return {
      "SyncBatchNorm", layers.ptr(), [layers](const torch::Tensor& x) mutable { return layers->forward(x); }, {4, 3, 16, 16}, 3};
}

TEST(SplitBackward, IsBitwiseBesideSyncBatchNorm) { expect_bitwise(synchronized()); }

TEST(SplitBackward, IsBitwiseThePlainOne) {
  for (const auto& cases : {blocks(), in_float8(), kept_elsewhere(), frozen(), modules()}) {
    for (const auto& each : cases) expect_bitwise(each);
  }
}

/// Where a weight is also read by what is not split, its sum comes in another order.
TEST(SplitBackward, AddsBothHalves) {
  torch::manual_seed(2);
  const auto scaled = std::make_shared<ScaledImpl>();
  const Case each{"activations of parameters", scaled, [scaled](const torch::Tensor& x) { return scaled->forward(x); }};
  const auto plain = run(each, false), split = run(each, true);
  ASSERT_EQ(split.of_parameters.size(), plain.of_parameters.size());
  for (const auto& [name, gradient] : plain.of_parameters)
    EXPECT_TENSORS_CLOSE(split.of_parameters.at(name), gradient, 1e-5, 1e-5) << name;
  for (size_t i = 0; i < plain.of_inputs.size(); ++i) EXPECT_TENSORS_EQUAL(split.of_inputs[i], plain.of_inputs[i]) << i;
}

TEST(SplitBackward, SumsTiedWeightsInOrder) {
  torch::manual_seed(4);
  torch::nn::Embedding table(11, kWidth);
  auto linear = torch::nn::Linear(torch::nn::LinearOptions(kWidth, 11).bias(false));
  linear->weight = table->weight;
  linear->register_parameter("tied", table->weight);
  const auto tokens = torch::arange(6).view({2, 3});
  const Forward forward = [=](const torch::Tensor& x) mutable { return linear(table(tokens) + x) * 1.5; };
  expect_bitwise({"tied", linear.ptr(), forward, {2, 3, kWidth}, 2});
}

TEST(SplitBackward, CallsHooksOnceAMicroBatch) {
  const auto one = block();
  int calls = 0;
  one->up->weight.register_hook([&](const torch::Tensor& gradient) {
    ++calls;
    return gradient * 3;
  });
  expect_bitwise({"a hook", one, [one](const torch::Tensor& x) { return one->forward(x); }, {2, 6, kWidth}, 5});
  EXPECT_EQ(calls, 6);
}

TEST(SplitBackward, RecomputesOnce) {
  int runs = 0;
  const auto one = block();
  const auto counted = [one, &runs](const torch::Tensor& x) {
    ++runs;
    return one->forward(x);
  };
  run({"counted", one, [&](const torch::Tensor& x) { return recompute(counted, x); }}, true);
  EXPECT_EQ(runs, 6);
}

TEST(SplitBackward, RefusesASecondBackwardAndADoubleOne) {
  const auto one = block();
  const auto out = [&] {
    const SplitBackward scope(std::make_shared<WeightQueue>());
    return one->forward(torch::ones({1, 2, kWidth})).sum();
  };
  EXPECT_THROWS_WITH(out().backward({}, /*retain_graph=*/true), "a graph has one backward, and no double one");
  EXPECT_THROWS_WITH(out().backward({}, /*retain_graph=*/false, /*create_graph=*/true), "no double one");
}

TEST(SplitBackward, LeavesOtherForwardsAlone) {
  const auto one = block();
  const auto queue = std::make_shared<WeightQueue>();
  {
    const SplitBackward scope(queue);
    const torch::NoGradGuard no_grad;
    one->forward(torch::ones({1, 2, kWidth}));
  }
  one->forward(torch::ones({1, 2, kWidth}));
  EXPECT_EQ(queue->expected(), 0U);
}

struct StackImpl : torch::nn::Module {
  explicit StackImpl(bool recomputes_blocks) : recomputes(recomputes_blocks) {
    for (int i = 0; i < 2; ++i) blocks.push_back(register_module(c10::str("block", i), block()));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& each : blocks) x = recomputes ? recompute(*each, x) : each->forward(x);
    return x;
  }
  bool recomputes;
  std::vector<std::shared_ptr<GptBlockImpl>> blocks;
};

TEST(SplitBackward, IsBitwiseUnderFullyShard) {
  const auto mesh = init_device_mesh(torch::kCPU, {world_size()}, {"dp"});
  FullyShardOptions kept, low;
  kept.reshard_after_forward = false;
  low.mixed_precision = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
  const std::vector<std::pair<std::string, FullyShardOptions>> settings{{"default", {}}, {"kept", kept}, {"bf16", low}};
  for (const auto& [name, options] : settings) {
    for (const bool recomputes : {false, true}) {
      for (const bool reduces_each : {false, true}) {
        SCOPED_TRACE(c10::str(name, recomputes ? ", recomputed" : "", reduces_each ? ", each reduces" : ""));
        const auto stack = std::make_shared<StackImpl>(recomputes);
        for (auto& each : stack->blocks) fully_shard(*each, mesh, options);
        auto root = fully_shard(*stack, mesh, options);
        const Case one{name, stack, [stack](const torch::Tensor& x) { return stack->forward(x); }};
        const auto before = [&](bool last) { root.set_requires_gradient_sync(reduces_each || last); };
        const auto plain = run(one, false, before), split = run(one, true, before);
        EXPECT_GE(split.split_ops, 10U);
        if (!reduces_each) expect_same(split, plain); // otherwise sums over the ranks come in another order
        for (const auto& [parameter, gradient] : plain.of_parameters)
          EXPECT_TENSORS_CLOSE(split.of_parameters.at(parameter), gradient, 1e-4, 1e-5) << parameter;
      }
    }
  }
}

} // namespace
} // namespace tessera::testing::split_backward_test
