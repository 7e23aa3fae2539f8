// Random models under random plans on random meshes, beside one process: whatever a plan says, the numbers are the same.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/fsdp/fully_shard.h>
#include <tessera/parallel/parallelize.h>

#include <tessera/tests/fsdp/parallel_mlp.h>
#include <tessera/tests/parallel/parallel_gpt.h>
#include <tessera/tests/parallel/random_net.h>
#include <tessera/tests/support/draw.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>

#include <numeric>
#include <string>
#include <vector>

namespace tessera::testing::random_models_test {
namespace {

using namespace random_net; // NOLINT(google-build-using-namespace)
using torch::Tensor;

void shard(Net& net, const Drawn& drawn, const ParallelMesh& mesh, Draw& dice) {
  if (!drawn.shards && mesh.data_ranks() == 1) return;
  FullyShardOptions options;
  options.layout = dice.chance(50) ? BufferLayout::kRagged : BufferLayout::kPerParameter;
  if (dice.chance(30)) options.reshard_after_forward = false;
  shard_at_random(net, mesh.data_parallel, options, dice);
}

Tensor loss_of(Net& net, const Drawn& drawn, const Tensor& tokens, const Tensor& targets) {
  return torch::cross_entropy_loss(net->forward(tokens).flatten(0, 1), targets.flatten(), {}, at::Reduction::Mean, -100,
                                   drawn.smoothing);
}

/// Two backwards into one gradient.
void run_case(uint64_t seed) {
  const Drawn drawn(seed);
  Draw dice(seed + 2);
  const ParallelMesh mesh(dice.of(parallel_shapes()));
  const auto plan = draw_plan(drawn, mesh.tensor_parallel.size(), dice);
  SCOPED_TRACE(c10::str("case ", seed, " on ", mesh.all.to_string(), "\n", to_string(plan)));
  auto twin = make_net(drawn, seed), net = make_net(drawn, seed);
  parallelize(*net, mesh.tensor_parallel, plan, {.overlap = draw_overlap(dice)});
  shard(net, drawn, mesh, dice);
  for (const int64_t step : {0, 1}) {
    torch::manual_seed(static_cast<int64_t>(seed) + step);
    const auto tokens = torch::randint(kVocabulary, {12, drawn.time}, torch::kLong);
    auto targets = torch::randint(kVocabulary, {12, drawn.time}, torch::kLong);
    if (drawn.ignores) targets.slice(1, 0, 1).fill_(-100); // as many on each rank
    if (drawn.ignores && drawn.time == 1) targets.random_(kVocabulary);
    const auto rank = mesh.data_rank(), ranks = mesh.data_ranks();
    const auto expected = loss_of(twin, drawn, tokens, targets);
    const auto part = loss_of(twin, drawn, tokens.chunk(ranks)[rank], targets.chunk(ranks)[rank]).item<double>();
    const auto loss = loss_of(net, drawn, tokens.chunk(ranks)[rank], targets.chunk(ranks)[rank]);
    ASSERT_NEAR(loss.item<double>(), part, 1e-10);
    expected.backward();
    loss.backward();
  }
  const auto expected = twin->named_parameters();
  for (const auto& item : net->named_parameters()) {
    const auto &gradient = item.value().grad(), &wanted = expected[item.key()].grad();
    ASSERT_EQ(gradient.defined(), wanted.defined()) << item.key();
    if (!wanted.defined()) continue;
    EXPECT_EQ(DTensor(gradient).placements(), DTensor(item.value()).placements()) << item.key();
    EXPECT_TENSORS_CLOSE(whole_of(gradient), wanted, 1e-8, 1e-11) << item.key();
  }
}

TEST(RandomParallelModels, GiveTheNumbersOfOneProcess) {
  std::vector<uint64_t> seeds(300);
  std::iota(seeds.begin(), seeds.end(), uint64_t{0});
  for (const auto seed : sweep(seeds, 25)) {
    run_case(seed);
    if (::testing::Test::HasFatalFailure() || ::testing::Test::HasNonfatalFailure()) return;
  }
}

} // namespace
} // namespace tessera::testing::random_models_test
