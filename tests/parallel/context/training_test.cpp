// Models whose sequences are split over cp and whose rows over dp, with parameters that are sharded over both.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <tessera/fsdp/fully_shard.h>
#include <tessera/parallel/context_attention.h>
#include <tessera/parallel/split_sequence.h>

#include <tessera/tests/parallel/gpt_training.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>
#include <tessera/tests/support/test_device.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing::training_test {
namespace {

/// Meshes with a dim "cp", and the mesh over which parameters are sharded.
struct Layout {
  std::string name;
  DeviceMesh all, parameters;
  int64_t data_ranks, data_rank;
};

Layout layout_of(int64_t replicas, int64_t shards, int64_t parts) {
  Layout layout;
  layout.name = c10::str(replicas, " x ", shards, " x ", parts);
  layout.all = init_device_mesh(test_device_type(), {replicas, shards, parts}, {"replicate", "shard", "cp"});
  const auto flat = layout.all[{"shard", "cp"}].flatten("shard_cp");
  layout.parameters = replicas == 1 ? flat : DeviceMesh::concatenate({layout.all["replicate"], flat});
  layout.data_ranks = replicas * shards;
  layout.data_rank = layout.all.local_rank("replicate") * shards + layout.all.local_rank("shard");
  return layout;
}

/// All factorings of the world's ranks into replicas, shards and parts.
std::vector<Layout> layouts() {
  std::vector<Layout> all;
  const auto world = world_size();
  for (int64_t replicas = 1; replicas <= world; ++replicas) {
    for (int64_t shards = 1; replicas * shards <= world; ++shards)
      if (world % (replicas * shards) == 0) all.push_back(layout_of(replicas, shards, world / replicas / shards));
  }
  return all;
}

struct TrainingRun {
  MakeOptimizer optimizer = sgd;
  FullyShardOptions options = {};
  ContextParallel scheme = ContextParallel::kAllGather;
  PartOrder order = PartOrder::kHeadTail;
  bool recomputes = false;
  int64_t steps = 20;
  std::function<void(SmallGpt&, const DeviceMesh&, const FullyShardOptions&)> shard = {};

  GptTraining training() const { return {optimizer, steps}; }
};

SmallGpt make_gpt(bool recomputes = false) {
  torch::manual_seed(3);
  SmallGpt gpt;
  gpt->recomputes = recomputes;
  return gpt;
}

void shard_gpt(SmallGpt& gpt, const DeviceMesh& mesh, const FullyShardOptions& options) {
  for (auto& block : *gpt->blocks) fully_shard(*block, mesh, options).set_gradient_divide_factor(1);
  fully_shard(*gpt, mesh, options).set_gradient_divide_factor(1);
}

/// This rank's loss, of which the sum over the ranks is that of one process.
torch::Tensor loss_of_part(SmallGpt& gpt, const Rows& rows, const Layout& layout, const TrainingRun& run) {
  const auto mine = [&](const torch::Tensor& tensor) { return tensor.chunk(layout.data_ranks)[layout.data_rank]; };
  const auto parts = split_sequence({mine(rows.tokens), mine(rows.labels)}, {1, 1}, layout.all["cp"],
                                    {.order = run.order, .pad_values = {0, kIgnored}});
  const ContextParallelScope scope(run.scheme);
  const auto logits = gpt->forward(parts.tensors[0], parts.positions);
  return sum_of_losses(to_local(logits), parts.tensors[1].local()) / rows.valid();
}

TrainedGpt train_whole(const TrainingRun& run) {
  auto gpt = make_gpt();
  return train(
      gpt, run.training(), [&](const Rows& rows) { return loss_of_whole(gpt, rows); }, item);
}

TrainedGpt train_split(const Layout& layout, const TrainingRun& run) {
  auto gpt = make_gpt(run.recomputes);
  (run.shard ? run.shard : shard_gpt)(gpt, layout.parameters, run.options);
  return train(
      gpt, run.training(), [&](const Rows& rows) { return loss_of_part(gpt, rows, layout, run); }, sum_over_ranks);
}

constexpr double kBound = 1e-5;
constexpr ContextParallel kSchemes[] = {ContextParallel::kAllGather, ContextParallel::kRing, ContextParallel::kUlysses};

struct Split {
  Layout layout;
  ContextParallel scheme;

  std::string name() const { return layout.name + ", " + to_string(scheme); }
};

std::vector<Split> splits() {
  std::vector<Split> all;
  for (const auto& layout : layouts()) {
    for (const auto scheme : kSchemes) {
      if (scheme != ContextParallel::kUlysses || layout.all.size(2) != 3) all.push_back({layout, scheme}); // 8 heads
    }
  }
  return all;
}

TEST(ContextTraining, MatchesOneProcessOverAllFactorings) {
  for (const auto& optimizer : {MakeOptimizer(sgd), MakeOptimizer(adamw)}) {
    const auto expected = train_whole({.optimizer = optimizer});
    EXPECT_LT(expected.losses.back(), expected.losses.front());
    for (const auto& split : sweep(splits(), 4)) {
      SCOPED_TRACE(split.name());
      const auto order = split.scheme == ContextParallel::kRing ? PartOrder::kHeadTail : PartOrder::kContiguous;
      expect_close(train_split(split.layout, {.optimizer = optimizer, .scheme = split.scheme, .order = order}), expected, kBound);
    }
  }
}

/// Ways to shard, of which the mesh has the dims "shard" and "cp" as one.
std::vector<std::pair<std::string, TrainingRun>> ways() {
  std::vector<std::pair<std::string, TrainingRun>> all;
  for (const auto layout : {BufferLayout::kRagged, BufferLayout::kPerParameter}) {
    const std::string suffix = layout == BufferLayout::kRagged ? ", ragged" : ", per parameter";
    for (const auto strategy : {Strategy::kFullShard, Strategy::kZero1, Strategy::kZero2, Strategy::kNoShard}) {
      FullyShardOptions options;
      options.layout = layout;
      options.strategy = strategy;
      all.push_back({std::string(row_of(strategy).name) + suffix, {.options = options, .steps = 4}});
    }
    FullyShardOptions options;
    options.layout = layout;
    options.reshard_after_forward = false;
    all.push_back({"kept after forward" + suffix, {.options = options, .steps = 4}});
    all.push_back({"recomputed" + suffix,
                   {.options = {.layout = layout}, .scheme = ContextParallel::kRing, .recomputes = true, .steps = 4}});
  }
  return all;
}

TEST(ContextTraining, MatchesOneProcessUnderEveryStrategy) {
  const auto world = world_size();
  const auto expected = train_whole({.steps = 4});
  for (const auto& [name, run] : ways()) {
    for (const auto& layout :
         {layout_of(1, 1, world), layout_of(1, world % 2 == 0 ? 2 : 1, world % 2 == 0 ? world / 2 : world)}) {
      SCOPED_TRACE(name + ", " + layout.name);
      expect_close(train_split(layout, run), expected, kBound);
    }
  }
}

TEST(ContextTraining, MatchesOneProcessWithHybridAndHierarchicalSharding) {
  if (world_size() != 4) GTEST_SKIP() << "replicas, and parts within them";
  const auto expected = train_whole({.steps = 4});
  for (const auto strategy : {Strategy::kHybridShard, Strategy::kHierarchical}) {
    for (const auto buffers : {BufferLayout::kRagged, BufferLayout::kPerParameter}) {
      SCOPED_TRACE(row_of(strategy).name);
      FullyShardOptions options;
      options.strategy = strategy;
      options.layout = buffers;
      expect_close(train_split(layout_of(2, 1, 2), {.options = options, .scheme = ContextParallel::kRing, .steps = 4}), expected,
                   kBound);
    }
  }
}

/// One process that computes in bfloat16, with weights and sums of gradients in fp32, as the policy has it.
TrainedGpt train_whole_in_bf16(const TrainingRun& run) {
  auto gpt = make_gpt(), rounded = make_gpt();
  rounded->to(torch::kBFloat16);
  const auto weights = gpt->parameters(), copies = rounded->parameters();
  const auto loss_of = [&](const Rows& rows) {
    {
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < weights.size(); ++i) copies[i].copy_(weights[i]);
    }
    rounded->zero_grad();
    auto loss = loss_of_whole(rounded, rows);
    loss.backward();
    for (size_t i = 0; i < weights.size(); ++i) weights[i].mutable_grad() = copies[i].grad().to(torch::kFloat);
    return torch::zeros({}, torch::requires_grad()) + loss.detach(); // whose own backward adds nothing
  };
  return train(gpt, run.training(), loss_of, item);
}

double distance(const TrainedGpt& a, const TrainedGpt& b) {
  double sum = 0;
  for (size_t i = 0; i < a.weights.size(); ++i)
    sum += (a.weights[i] - b.weights[i]).to(torch::kDouble).square().sum().item<double>();
  return std::sqrt(sum);
}

TEST(ContextTraining, IsAsExactAsOneProcessUnderMixedPrecision) {
  TrainingRun run;
  const auto exact = train_whole(run), one = train_whole_in_bf16(run);
  run.options.mixed_precision.param_dtype = torch::kBFloat16;
  run.options.mixed_precision.reduce_dtype = torch::kFloat;
  for (const auto& split : sweep(splits(), 3)) {
    SCOPED_TRACE(split.name());
    run.scheme = split.scheme;
    EXPECT_LE(distance(train_split(split.layout, run), exact), 2 * distance(one, exact));
  }
}

TEST(ContextTraining, EvaluatesWithoutGradMode) {
  auto whole = make_gpt();
  const Rows rows(0);
  const auto expected = loss_of_whole(whole, rows).item<double>();
  const auto layout = layout_of(1, 1, world_size());
  for (const auto strategy : {Strategy::kFullShard, Strategy::kZero2, Strategy::kNoShard}) {
    FullyShardOptions options;
    options.strategy = strategy;
    auto gpt = make_gpt();
    shard_gpt(gpt, layout.parameters, options);
    const torch::NoGradGuard no_grad;
    for (const auto scheme : {ContextParallel::kAllGather, ContextParallel::kRing})
      EXPECT_NEAR(sum_over_ranks(loss_of_part(gpt, rows, layout, {.scheme = scheme})), expected, kBound) << row_of(strategy).name;
  }
}

TEST(ContextTraining, TwoRunsAreEqualBitByBit) {
  const auto layout = layout_of(1, 1, world_size());
  for (const auto scheme : {ContextParallel::kAllGather, ContextParallel::kRing}) {
    const TrainingRun run{.scheme = scheme, .steps = 3};
    const auto first = train_split(layout, run), second = train_split(layout, run);
    for (size_t i = 0; i < first.weights.size(); ++i) EXPECT_TENSORS_EQUAL(first.weights[i], second.weights[i]);
  }
}

} // namespace
} // namespace tessera::testing::training_test
