// What is held between the two halves of a backward, beside the formula of docs/pipeline.md.
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/activations/recompute.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/parallel/backward/split_backward.h>
#include <tessera/parallel/run/stage_run.h>

#include <tessera/tests/fsdp/held_memory.h>
#include <tessera/tests/parallel/small_gpt.h>
#include <tessera/tests/support/world.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera::testing::held_between_test {
namespace {

using internal::pipeline::InputNode, internal::pipeline::SplitBackward, internal::pipeline::WeightQueue;
using Forward = std::function<torch::Tensor(const torch::Tensor&)>;

constexpr int64_t kRows = 4, kTime = 32, kWidth = 64, kHeads = 4, kKeyHeads = 2;

/// An op that waits, with the numbers of elements of its input and of its output.
struct Waiting {
  int64_t input = 0, output = 0;
};

/// The formula: the input, and the gradient of the output, of each op that waits.
int64_t formula(const std::vector<Waiting>& ops, int64_t size = sizeof(float)) {
  int64_t elements = 0;
  for (const auto& op : ops) elements += op.input + op.output;
  return elements * size;
}

std::vector<Waiting> ops_of_block() {
  constexpr int64_t rows = kRows * kTime, width = rows * kWidth, keys = rows * 2 * kWidth / kHeads * kKeyHeads;
  return {{width, width}, {width, keys}, {width, width}, {width, 3 * width}, {3 * width, width}};
}

struct Held {
  int64_t whole = 0, between = 0, after = 0; ///< bytes: before the backward, between its halves, after them
};

/// Of `count` micro-batches whose first halves have run, without the gradients of parameters, which are there before.
Held measure(
    const Forward& forward, const std::vector<int64_t>& input, int64_t count = 1, const std::function<void()>& free = [] {}) {
  const auto run = [&] {
    std::vector<std::shared_ptr<WeightQueue>> queues;
    Held held;
    HeldMemory memory;
    const auto now = [&] {
      memory.forget_peak();
      return memory.peak();
    };
    for (int64_t i = 0; i < count; ++i) {
      queues.push_back(std::make_shared<WeightQueue>());
      const std::shared_ptr<InputNode> inputs(new InputNode, torch::autograd::deleteNode);
      torch::Tensor loss;
      {
        const SplitBackward scope(queues.back());
        loss = torch::sin(forward(inputs->add(torch::randn(input)))).sum();
      }
      if (i == 0) held.whole = now();
      loss.backward();
      inputs->take();
    }
    free();
    held.between = now();
    for (const auto& queue : queues) queue->run();
    free();
    held.after = now();
    return held;
  };
  run(); // the first makes gradients, and what groups keep
  return run();
}

/// At most the formula, nothing of a graph after it, and not so little that nothing would have waited.
void expect_at_most(const Held& held, int64_t bound) {
  EXPECT_LE(held.between, bound);
  EXPECT_GE(held.between, bound / 2);
  EXPECT_EQ(held.after, 0);
}

std::shared_ptr<GptBlockImpl> block() {
  torch::manual_seed(1);
  return std::make_shared<GptBlockImpl>(kWidth, kHeads, kKeyHeads);
}

const std::vector<int64_t> kInput{kRows, kTime, kWidth};

TEST(HeldBetweenHalves, IsOfABlockWhatTheFormulaSays) {
  const auto one = block();
  const auto held = measure([&](const torch::Tensor& x) { return one->forward(x); }, kInput);
  expect_at_most(held, formula(ops_of_block()));
  EXPECT_LT(held.between, held.whole); // beside all that the whole backward needs
}

TEST(HeldBetweenHalves, GrowsWithTheMicroBatchesThatWait) {
  const auto one = block();
  expect_at_most(measure([&](const torch::Tensor& x) { return one->forward(x); }, kInput, 3), 3 * formula(ops_of_block()));
}

/// And what the second run began with: the block's input, and the state of the generator.
TEST(HeldBetweenHalves, HasTheInputOfARecomputedBlock) {
  const auto one = block();
  const auto held = measure([&](const torch::Tensor& x) { return recompute(*one, x); }, kInput);
  const auto input = kRows * kTime * kWidth * static_cast<int64_t>(sizeof(float));
  const auto state = static_cast<int64_t>(at::detail::getDefaultCPUGenerator().get_state().nbytes());
  expect_at_most(held, formula(ops_of_block()) + input + state);
}

TEST(HeldBetweenHalves, IsOfConvolutionsAndLookupsWhatTheFormulaSays) {
  using namespace torch::nn; // NOLINT(google-build-using-namespace)
  torch::manual_seed(2);
  Sequential layers(Conv2d(Conv2dOptions(3, 8, 3).padding(1)), ReLU(), Conv2d(Conv2dOptions(8, 8, 3).padding(1)), Flatten(),
                    Linear(8 * 256, 10));
  const auto image = 4 * 256;
  const auto held = measure([&](const torch::Tensor& x) { return layers->forward(x); }, {4, 3, 16, 16});
  expect_at_most(held, formula({{3 * image, 8 * image}, {8 * image, 8 * image}, {8 * image, 40}}));
  Embedding table(11, kWidth);
  const auto tokens = torch::arange(kTime).remainder(11).expand({kRows, kTime});
  const auto of_table = measure([&](const torch::Tensor& x) { return torch::sin(table(tokens) * x); }, kInput);
  expect_at_most(of_table, formula({{0, kRows * kTime * kWidth}}) + static_cast<int64_t>(kRows * kTime * sizeof(int64_t)));
}

/// Half of the bytes, and the copies of weights in the other dtype.
TEST(HeldBetweenHalves, HasTheCastWeightsUnderAutocast) {
  const auto one = block();
  const auto held = measure(
      [&](const torch::Tensor& x) {
        at::autocast::set_autocast_enabled(at::kCPU, true);
        auto out = one->forward(x);
        at::autocast::clear_cache();
        at::autocast::set_autocast_enabled(at::kCPU, false);
        return out.to(torch::kFloat);
      },
      kInput);
  int64_t weights = 0;
  for (const auto& each : one->parameters()) weights += each.dim() > 1 ? each.numel() : 0;
  EXPECT_LE(held.between, formula(ops_of_block(), /*size=*/2) + 2 * weights);
  EXPECT_GT(held.between, 0);
  EXPECT_EQ(held.after, 0);
}

/// What is gathered of a group is freed between the halves, and the weights' gradients need none of it.
TEST(HeldBetweenHalves, HasNoGatheredWeights) {
  const auto one = block();
  auto sharded = fully_shard(*one, init_device_mesh(torch::kCPU, {world_size()}, {"dp"}));
  sharded.set_requires_gradient_sync(false);
  const auto held = measure([&](const torch::Tensor& x) { return one->forward(x); }, kInput, 2, [&] { sharded.reshard(); });
  EXPECT_LE(held.between, 2 * formula(ops_of_block()));
  EXPECT_GE(held.between, formula(ops_of_block()));
}

} // namespace
} // namespace tessera::testing::held_between_test
