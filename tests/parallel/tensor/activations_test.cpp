// What a forward keeps for its backward.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/parallel/parallelize.h>

#include <tessera/tests/fsdp/held_memory.h>
#include <tessera/tests/parallel/parallel_gpt.h>

namespace tessera::testing::activations_test {
namespace {

/// Bytes that a forward leaves behind for its backward.
int64_t held_after_forward(gpt::Gpt& model, const torch::Tensor& tokens) {
  HeldMemory memory;
  const auto kept = model->forward(tokens);
  memory.forget_peak();
  return memory.peak();
}

/// Sequence parallelism splits what lies between the layers, and their inputs are gathered again in backward (Korthikanti et al.,
/// "Reducing Activation Recomputation in Large Transformer Models", 2022, section 4.2).
TEST(Activations, OfSequenceParallelismAreAPart) {
  if (test_device_type() != torch::kCPU) GTEST_SKIP() << "the memory of the CPU is measured";
  auto config = small_gpt(/*layers=*/3);
  config.sequence = 768;
  auto whole = seeded_gpt(config), model = seeded_gpt(config);
  const auto mesh = init_device_mesh(torch::kCPU, {world_size()}, {"tp"});
  parallelize(*model, mesh, gpt_plan(/*sequence=*/true));
  const auto tokens = draw_tokens(0, 2, config.sequence).inputs;
  const auto expected = held_after_forward(whole, tokens);
  model->forward(tokens).sum().backward(); // the first has its communicators and plans
  const auto held = held_after_forward(model, tokens);
  EXPECT_GT(held, 0);
  EXPECT_LE(static_cast<double>(held) / static_cast<double>(expected), 1.0 / static_cast<double>(world_size()) + 0.05);
}

} // namespace
} // namespace tessera::testing::activations_test
