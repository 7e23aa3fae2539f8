// Attention of unmodified modules, and what is refused on split sequences.
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/activations/recompute.h>
#include <tessera/dtensor/debug.h>
#include <tessera/parallel/context_attention.h>
#include <tessera/parallel/split_sequence.h>

#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/test_device.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing::dispatch_test {
namespace {

constexpr ContextParallel kSchemes[] = {ContextParallel::kAllGather, ContextParallel::kRing, ContextParallel::kUlysses};
constexpr double kNear = 1e-5;

DeviceMesh cp_mesh() { return init_device_mesh(test_device_type(), {world_size()}, {"cp"}); }

torch::Tensor heads(int64_t length) {
  torch::manual_seed(11);
  return torch::randn({2, 12, length, 8});
}

torch::Tensor causal(const torch::Tensor& x) {
  return at::scaled_dot_product_attention(x, x * 0.5, x + 1, {}, 0.0, /*is_causal=*/true);
}

TEST(ContextDispatch, MeetsAttentionOfSplitSequences) {
  const auto x = heads(19), expected = causal(x);
  const auto parts = split_sequence({x}, {2}, cp_mesh());
  EXPECT_TENSORS_CLOSE(merge_sequence(causal(parts.tensors[0]), 2).cpu(), expected, kNear, kNear);
  for (const auto scheme : kSchemes) {
    const ContextParallelScope scope(scheme);
    EXPECT_TENSORS_CLOSE(merge_sequence(causal(parts.tensors[0]), 2).cpu(), expected, kNear, kNear);
    const c10::InferenceMode inference;
    EXPECT_TENSORS_CLOSE(merge_sequence(causal(parts.tensors[0]), 2).cpu(), expected, kNear, kNear);
  }
}

TEST(ContextDispatch, UsesTheInnermostScope) {
  if (world_size() == 1) GTEST_SKIP() << "nothing is sent";
  const auto x = split_sequence({heads(16 * world_size())}, {2}, cp_mesh()).tensors[0];
  const auto sends = [&](CollectiveKind kind) {
    const CountCollectives counts;
    causal(x);
    return counts.count(kind).calls;
  };
  EXPECT_EQ(sends(CollectiveKind::kAllGather), 1);
  const ContextParallelScope ring(ContextParallel::kRing);
  EXPECT_EQ(sends(CollectiveKind::kAllToAll), world_size() - 1);
  {
    const ContextParallelScope ulysses(ContextParallel::kUlysses);
    EXPECT_EQ(sends(CollectiveKind::kAllToAll), 2);
  }
  EXPECT_EQ(sends(CollectiveKind::kAllToAll), world_size() - 1);
}

TEST(ContextDispatch, MeetsAttentionOfPlainPartsInAScopeWithAMesh) {
  const auto length = 8 * world_size();
  const auto x = heads(length), expected = causal(x);
  for (const auto order : {PartOrder::kContiguous, PartOrder::kHeadTail}) {
    const auto parts = split_sequence({x, expected}, {2, 2}, cp_mesh(), {.order = order});
    const auto mine = parts.tensors[0].local();
    for (const auto scheme : kSchemes) {
      const ContextParallelScope scope(scheme, parts.mesh);
      EXPECT_TENSORS_CLOSE(causal(mine), parts.tensors[1].local(), kNear, kNear);
      const torch::NoGradGuard no_grad;
      EXPECT_TENSORS_CLOSE(causal(mine), parts.tensors[1].local(), kNear, kNear);
    }
  }
}

TEST(ContextDispatch, LeavesOtherAttentionAlone) {
  const auto x = heads(9).to(test_device_type());
  const auto expected = causal(x);
  const ContextParallelScope scope(ContextParallel::kRing);
  const CountCollectives counts;
  EXPECT_TENSORS_EQUAL(causal(x), expected);
  EXPECT_EQ(counts.total_calls(), 0);
}

TEST(ContextDispatch, TakesFewerDims) {
  const auto x = heads(12)[0];
  const auto attend = [](const torch::Tensor& q) { return at::scaled_dot_product_attention(q, q, q); };
  for (const auto& whole : {x, x[0]}) {
    const auto dim = whole.dim() - 2;
    const auto part = split_sequence({whole}, {dim}, cp_mesh()).tensors[0];
    EXPECT_TENSORS_CLOSE(merge_sequence(attend(part), dim).cpu(), attend(whole), kNear, kNear);
  }
}

TEST(ContextDispatch, SecondRunsAreInTheScopeOfTheFirst) {
  const auto x = heads(16);
  for (const auto scheme : kSchemes) {
    const auto part = split_sequence({x}, {2}, cp_mesh()).tensors[0].detach().requires_grad_();
    const auto again = split_sequence({x}, {2}, cp_mesh()).tensors[0].detach().requires_grad_();
    torch::Tensor out;
    {
      const ContextParallelScope scope(scheme);
      out = recompute([](const torch::Tensor& given) { return causal(given).square(); }, part);
      causal(again).square().sum().backward();
    }
    out.sum().backward();
    EXPECT_TENSORS_EQUAL(DTensor(part.grad()).local(), DTensor(again.grad()).local());
  }
}

TEST(ContextDispatch, NamesHeadsThatUlyssesCannotDivide) {
  if (world_size() == 1) GTEST_SKIP() << "all heads divide";
  torch::manual_seed(1);
  const auto q = split_sequence({torch::randn({1, 7, 8, 4})}, {2}, cp_mesh()).tensors[0];
  EXPECT_THROWS_WITH(
      context_parallel_attention(q, q, q, {.scheme = ContextParallel::kUlysses}),
      c10::str("7 heads and 7 key heads do not divide over ", world_size(), " ranks; numbers of ranks that fit: 1, 7"));
}

TEST(ContextDispatch, NamesWhatIsWrong) {
  const auto mesh = cp_mesh();
  const auto q = split_sequence({heads(8)}, {2}, mesh).tensors[0], longer = split_sequence({heads(64)}, {2}, mesh).tensors[0];
  const auto plain = heads(8);
  EXPECT_THROWS_WITH(at::scaled_dot_product_attention(q, q, q, {}, 0.1), "dropout of the attention's weights (0.1)");
  EXPECT_THROWS_WITH(context_parallel_attention(plain, plain, plain), "it takes the mesh as well");
  EXPECT_THROWS_WITH(context_parallel_attention(q, q, q, mesh), "are plain: each rank's part");
  EXPECT_THROWS_WITH(context_parallel_attention(q, longer, longer, {.is_causal = true}), "they are of one sequence");
  EXPECT_THROWS_WITH(context_parallel_attention(q, q, q.to(torch::kDouble)), "they are of one floating-point dtype");
  EXPECT_THROWS_WITH(context_parallel_attention(q, q.redistribute({Replicate{}}), q), "must lie alike, Shard(2)");
  EXPECT_THROWS_WITH(context_parallel_attention(q, q, q, {.mask = torch::ones({3, 3}, torch::kBool)}), "does not fit [2, 12, ");
  EXPECT_THROWS_WITH(context_parallel_attention(q, q, q, {.mask = torch::ones({8, 8}, torch::kBool), .is_causal = true}),
                     "put the causal mask into the given one");
  EXPECT_THROWS_WITH(context_parallel_attention(q, q, q, {.mask = torch::zeros({8, 8}, torch::requires_grad())}),
                     "requires a gradient");
  EXPECT_THROWS_WITH(context_parallel_attention(q, q, q, {.cu_seqlens = {0, 5}}),
                     "they rise from 0 to the length of the sequence, 8");
  EXPECT_THROWS_WITH(
      ContextParallelScope(ContextParallel::kRing, init_device_mesh(test_device_type(), {1, world_size()}, {"dp", "cp"})),
      "a mesh of one dim is needed");
}

TEST(ContextDispatch, NamesTheRankWhosePartIsOfAnotherLength) {
  if (world_size() == 1) GTEST_SKIP() << "one rank has one part";
  if (test_device_type() != torch::kCPU) GTEST_SKIP() << "a device says so at a later call";
  const auto mesh = cp_mesh();
  for (const auto scheme : {ContextParallel::kAllGather, ContextParallel::kRing}) {
    // The group of a failed collective cannot be used again.
    const auto own = mesh_from_communicator(
        process_context().communicator(mesh.rank_list(), mesh.device_type(), c10::str("lengths, ", to_string(scheme))), "cp");
    const auto part = torch::randn({1, 2, world_rank() == 0 ? 4 : 6, 8}).to(mesh.device());
    const auto text = error_of([&] { context_parallel_attention(part, part, part, own, {.scheme = scheme}); });
    EXPECT_NE(text.find("[1, 2, 4, 8]"), std::string::npos) << text;
    EXPECT_NE(text.find("[1, 2, 6, 8]"), std::string::npos) << text;
  }
}

TEST(ContextDispatch, RefusesLayersAlongASplitSequence) {
  if (world_size() == 1) GTEST_SKIP() << "one rank has the whole sequence";
  const auto mesh = cp_mesh();
  torch::manual_seed(2);
  const auto x = split_sequence({torch::randn({2, 24, 6})}, {1}, mesh).tensors[0];
  const auto refused = "under context parallelism, where each rank of";
  EXPECT_THROWS_WITH(x.cumsum(1), refused);
  EXPECT_THROWS_WITH(x.flip(1), refused);
  EXPECT_THROWS_WITH(x.slice(1, 0, -1), refused);
  EXPECT_THROWS_WITH(x.select(1, -1), refused);
  EXPECT_THROWS_WITH(x.sort(1), refused);
  EXPECT_THROWS_WITH(torch::matmul(x, x.transpose(1, 2)).tril(), refused);
  EXPECT_THROWS_WITH(torch::conv1d(x.transpose(1, 2), distribute_tensor(torch::randn({6, 6, 3}), x.mesh(), {Replicate{}})),
                     refused);
  EXPECT_THROWS_WITH(split_sequence({torch::arange(24)}, {0}, mesh).tensors[0].slice(0, 1), refused);
  EXPECT_NEAR(merge_sequence(x, 1).mean().item<double>(), DTensor(x.mean()).full_tensor().item<double>(), 1e-6);
  const ContextParallelScope scope(ContextParallel::kRing, x.mesh());
  const auto plain = torch::randn({2, 6, 6});
  torch::nn::GRU gru(torch::nn::GRUOptions(6, 6).batch_first(true));
  torch::nn::LSTM lstm(6, 6);
  EXPECT_THROWS_WITH(gru(plain), "gru in a ContextParallelScope with a mesh");
  EXPECT_THROWS_WITH(lstm(plain), "lstm in a ContextParallelScope with a mesh");
  EXPECT_THROWS_WITH(torch::conv1d(plain, torch::randn({6, 6, 3})), "conv1d in a ContextParallelScope with a mesh");
}

TEST(ContextDispatch, RefusesPlainTensorsOfTheWholeSequence) {
  if (world_size() == 1) GTEST_SKIP() << "one rank has the whole sequence";
  torch::manual_seed(2);
  const auto x = split_sequence({torch::randn({2, 24, 6})}, {1}, cp_mesh()).tensors[0];
  EXPECT_THROWS_WITH(x + torch::randn({24, 6}).to(x.device()), "cannot be mixed with DTensors");
  const ImplicitReplication replication;
  EXPECT_THROWS_WITH(x + torch::randn({24, 6}).to(x.device()), "a plain tensor of the whole sequence is used");
  EXPECT_EQ((x + torch::ones({6}).to(x.device())).sizes(), x.sizes());
}

TEST(ContextDispatch, RefusesDerivativesOfItsGradient) {
  const auto x = split_sequence({heads(8)}, {2}, cp_mesh()).tensors[0].detach().requires_grad_();
  const auto loss = causal(x).square().sum();
  EXPECT_THROWS_WITH(torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true),
                     "its gradient has no derivative");
}

} // namespace
} // namespace tessera::testing::dispatch_test
