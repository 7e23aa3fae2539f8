// What the schemes send and keep, beside the formulas of docs/context_parallel.md.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/dtensor/debug.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/parallel/context_attention.h>
#include <tessera/parallel/split_sequence.h>

#include <tessera/tests/fsdp/held_memory.h>
#include <tessera/tests/parallel/small_gpt.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/test_device.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing::bytes_test {
namespace {

constexpr int64_t kBatch = 2, kHeads = 24, kKeyHeads = 12, kFeatures = 8;

struct Shapes {
  int64_t length() const { return 24; } // of 2, 3 and 4 ranks, in two chunks each
  int64_t width() const { return kBatch * length() * kHeads * kFeatures; }
  int64_t key_width() const { return kBatch * length() * kKeyHeads * kFeatures; }
};

struct Bytes {
  int64_t gathered, reduced, exchanged;
  bool operator==(const Bytes&) const = default;
};
std::ostream& operator<<(std::ostream& stream, const Bytes& bytes) {
  return stream << "all-gather " << bytes.gathered << ", reduce-scatter " << bytes.reduced << ", all-to-all " << bytes.exchanged;
}

Bytes sent_in(const std::function<void()>& function) {
  const CountCollectives counts;
  function();
  return {counts.count(CollectiveKind::kAllGather).bytes, counts.count(CollectiveKind::kReduceScatter).bytes,
          counts.count(CollectiveKind::kAllToAll).bytes};
}

struct Sent {
  Bytes forward, backward;
};

Sent sent_by(ContextParallel scheme, at::ScalarType dtype) {
  const Shapes shapes;
  const auto mesh = init_device_mesh(test_device_type(), {world_size()}, {"cp"});
  const auto q = torch::randn({kBatch, kHeads, shapes.length(), kFeatures}).to(dtype),
             k = torch::randn({kBatch, kKeyHeads, shapes.length(), kFeatures}).to(dtype);
  const auto parts = split_sequence({q, k, k}, {2, 2, 2}, mesh, {.compares_values = false});
  std::vector<torch::Tensor> leaves;
  for (const auto& each : parts.tensors) leaves.push_back(each.detach().requires_grad_());
  torch::Tensor loss;
  Sent sent{};
  sent.forward = sent_in([&] {
    loss = to_local(context_parallel_attention(leaves[0], leaves[1], leaves[2], {.scheme = scheme, .is_causal = true})).sum();
  });
  sent.backward = sent_in([&] { loss.backward(); });
  return sent;
}

// Counters count the whole buffer of a collective, also what stays on the rank: of an all-gather and a reduce-scatter (c - 1) / c
// go over the network, and of an all-to-all between all ranks too; of a step round the ring all.
TEST(ContextBytes, EqualTheFormulas) {
  torch::manual_seed(0);
  const Shapes shapes;
  const auto c = world_size();
  for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
    const auto e = static_cast<int64_t>(c10::elementSize(dtype)), keys = c == 1 ? 0 : 2 * shapes.key_width();
    const auto all = c == 1 ? 0 : 2 * (shapes.width() + shapes.key_width()) / c;
    const auto gather = sent_by(ContextParallel::kAllGather, dtype);
    EXPECT_EQ(gather.forward, (Bytes{keys * e, 0, 0}));
    EXPECT_EQ(gather.backward, (Bytes{keys * e, keys * 4, 0}));
    const auto ring = sent_by(ContextParallel::kRing, dtype);
    EXPECT_EQ(ring.forward, (Bytes{0, 0, keys * e * (c - 1) / c}));
    EXPECT_EQ(ring.backward, (Bytes{0, 0, keys * e * (c - 1) / c + keys * 4}));
    const auto ulysses = sent_by(ContextParallel::kUlysses, dtype);
    EXPECT_EQ(ulysses.forward, (Bytes{0, 0, all * e}));
    EXPECT_EQ(ulysses.backward, (Bytes{0, 0, all * e}));
  }
}

/// Bytes that a forward leaves behind for its backward.
template <typename Forward>
int64_t held_after(const Forward& forward) {
  HeldMemory memory;
  const auto kept = forward();
  memory.forget_peak();
  return memory.peak();
}

TEST(ContextBytes, HoldAPartOfTheActivations) {
  if (test_device_type() != torch::kCPU) GTEST_SKIP() << "the memory of the CPU is measured";
  torch::manual_seed(0);
  const SmallGptOptions options{.width = 48, .heads = 12, .key_heads = 12, .depth = 3, .sequence = 768};
  SmallGpt plain(options);
  const auto tokens = torch::randint(options.vocabulary, {2, options.sequence}, torch::kLong);
  const auto whole = held_after([&] { return plain->forward(tokens, torch::arange(options.sequence)); });
  const auto mesh = init_device_mesh(torch::kCPU, {1, world_size()}, {"dp", "cp"});
  const auto parts = split_sequence({tokens}, {1}, mesh["cp"]);
  for (const auto scheme : {ContextParallel::kAllGather, ContextParallel::kRing, ContextParallel::kUlysses}) {
    SmallGpt gpt(options);
    for (auto& block : *gpt->blocks) fully_shard(*block, mesh.flatten("all"));
    fully_shard(*gpt, mesh.flatten("all"));
    const ContextParallelScope scope(scheme);
    const auto forward = [&] { return gpt->forward(parts.tensors[0], parts.positions); };
    forward().sum().backward();
    const auto held = held_after(forward);
    EXPECT_GT(held, 0);
    EXPECT_LE(static_cast<double>(held) / static_cast<double>(whole), 1.0 / static_cast<double>(world_size()) + 0.05)
        << to_string(scheme);
  }
}

} // namespace
} // namespace tessera::testing::bytes_test
