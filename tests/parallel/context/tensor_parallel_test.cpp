// Models whose layers are split over tp, their sequences over cp, their rows over dp, with parameters that are sharded over dp
// and cp.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <string>
#include <vector>

#include <tessera/dtensor/debug.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/parallel/context_attention.h>
#include <tessera/parallel/parallelize.h>
#include <tessera/parallel/split_sequence.h>

#include <tessera/tests/parallel/gpt_training.h>
#include <tessera/tests/parallel/parallel_meshes.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>

namespace tessera::testing::tensor_parallel_test {
namespace {

using torch::Tensor;

constexpr double kBound = 1e-5;

struct Case {
  std::vector<int64_t> mesh;
  bool is_adamw = false, is_sequence_parallel = false;
  BufferLayout buffers = BufferLayout::kRagged;
  ContextParallel scheme = ContextParallel::kAllGather;
  int64_t key_heads = 12;
  bool recomputes = false;
  int64_t steps = 20;

  std::string name() const {
    return c10::str(c10::IntArrayRef(mesh), is_adamw ? ", AdamW" : ", SGD", is_sequence_parallel ? ", sequence" : "",
                    buffers == BufferLayout::kRagged ? ", ragged, " : ", per parameter, ", to_string(scheme), ", ", key_heads,
                    " key heads", recomputes ? ", recomputed" : "");
  }
  GptTraining training() const { return {is_adamw ? MakeOptimizer(adamw) : MakeOptimizer(sgd), steps}; }
};

SmallGpt make_gpt(const Case& each) {
  torch::manual_seed(3);
  SmallGpt gpt(SmallGptOptions{.heads = 12, .key_heads = each.key_heads});
  gpt->recomputes = each.recomputes;
  return gpt;
}

/// Key heads that the ranks do not divide stay whole.
ParallelPlan plan_of(const Case& each, int64_t ranks) {
  const Placement stream = each.is_sequence_parallel ? Placement(Shard{1}) : Placement(Replicate{});
  ParallelPlan plan{{"embed", VocabParallel{stream}},
                    {"blocks.*.query", Colwise{}},
                    {"blocks.*.projection", Rowwise{.output = stream}},
                    {"blocks.*.up", Colwise{}},
                    {"blocks.*.down", Rowwise{.output = stream}}};
  const bool divides = each.key_heads % ranks == 0;
  plan.push_back({"blocks.*.key_value", divides ? ParallelStyle(Colwise{.packed = 2}) : PrepareInput{Replicate{}}});
  if (each.is_sequence_parallel) plan.insert(plan.end(), {{"blocks.*.*norm", Sequence{}}, {"norm", Sequence{}}});
  return plan;
}

SmallGpt make_split(const Case& each, const ParallelMeshes& meshes) {
  auto gpt = make_gpt(each);
  parallelize(*gpt, meshes.all["tp"], plan_of(each, meshes.all.size(3)));
  FullyShardOptions options;
  options.layout = each.buffers;
  for (auto& block : *gpt->blocks) fully_shard(*block, meshes.parameters, options).set_gradient_divide_factor(1);
  fully_shard(*gpt, meshes.parameters, options).set_gradient_divide_factor(1);
  return gpt;
}

/// This rank's loss, of which the sum over the ranks of dp and cp is that of one process.
Tensor loss_of_part(SmallGpt& gpt, const Rows& rows, const ParallelMeshes& meshes, ContextParallel scheme) {
  const auto mine = [&](const Tensor& tensor) { return tensor.chunk(meshes.data_ranks())[meshes.data_rank()]; };
  const auto parts =
      split_sequence({mine(rows.tokens), mine(rows.labels)}, {1, 1}, meshes.all["cp"], {.pad_values = {0, kIgnored}});
  const ContextParallelScope scope(scheme, parts.mesh);
  const auto logits = gpt->forward(parts.tensors[0].local(), to_local(parts.positions));
  return sum_of_losses(logits, parts.tensors[1].local()) / rows.valid();
}

TrainedGpt train_whole(const Case& each) {
  auto gpt = make_gpt({.key_heads = each.key_heads});
  return train(
      gpt, each.training(), [&](const Rows& rows) { return loss_of_whole(gpt, rows); }, item);
}

TrainedGpt train_split(const Case& each) {
  const ParallelMeshes meshes(each.mesh);
  auto gpt = make_split(each, meshes);
  const auto number = [&](const Tensor& loss) {
    return sum_over_ranks(to_local(loss)) / static_cast<double>(meshes.all.size(3)); // which all ranks of tp have
  };
  return train(
      gpt, each.training(), [&](const Rows& rows) { return loss_of_part(gpt, rows, meshes, each.scheme); }, number);
}

void compare(const std::vector<Case>& cases) {
  for (const auto& each : cases) {
    SCOPED_TRACE(each.name());
    expect_close(train_split(each), train_whole(each), kBound);
    if (::testing::Test::HasFailure()) return;
  }
}

std::vector<ContextParallel> schemes_of(int64_t parts, int64_t heads) {
  if (parts == 1) return {ContextParallel::kAllGather};
  if (heads % parts != 0) return {ContextParallel::kAllGather, ContextParallel::kRing};
  return {ContextParallel::kAllGather, ContextParallel::kRing, ContextParallel::kUlysses};
}

TEST(TensorAndContextParallel, MatchOneProcessOverAllFactorings) {
  std::vector<Case> cases;
  for (const auto& mesh : mesh_factorings()) {
    for (const auto scheme : schemes_of(mesh[2], 12 / mesh[3])) {
      for (const bool is_adamw : {false, true}) {
        for (const bool is_sequence_parallel : {false, true}) {
          for (const auto buffers : {BufferLayout::kRagged, BufferLayout::kPerParameter})
            cases.push_back({mesh, is_adamw, is_sequence_parallel, buffers, scheme});
        }
      }
    }
  }
  compare(sweep(cases, 6));
}

/// Fewer key heads than ranks of tp, or others that they do not divide: each rank has all of them, and takes its own.
TEST(TensorAndContextParallel, MatchOneProcessWithSharedKeyHeads) {
  std::vector<Case> cases;
  for (const auto& mesh : mesh_factorings()) {
    for (const int64_t key_heads : {1, 2, 3, 4, 6}) {
      const auto scheme = key_heads % 2 == 0 ? ContextParallel::kRing : ContextParallel::kAllGather;
      for (const bool is_sequence_parallel : {false, true})
        cases.push_back(
            {.mesh = mesh, .is_sequence_parallel = is_sequence_parallel, .scheme = scheme, .key_heads = key_heads, .steps = 4});
    }
  }
  const auto is_shared = [](const Case& each) { return each.key_heads % each.mesh[3] != 0; };
  std::stable_partition(cases.begin(), cases.end(), is_shared);
  compare(sweep(cases, 6));
}

TEST(TensorAndContextParallel, RecomputesInTheScopeOfTheFirstRun) {
  std::vector<Case> cases;
  for (const auto& mesh : mesh_factorings()) {
    for (const bool is_sequence_parallel : {false, true})
      cases.push_back({.mesh = mesh,
                       .is_sequence_parallel = is_sequence_parallel,
                       .scheme = ContextParallel::kRing,
                       .recomputes = true,
                       .steps = 4});
  }
  compare(sweep(cases, 4));
}

TEST(TensorAndContextParallel, EvaluateWithoutGradMode) {
  const torch::NoGradGuard no_grad;
  const Rows rows(0);
  for (const auto& mesh : mesh_factorings()) {
    const Case each{.mesh = mesh, .is_sequence_parallel = true};
    SCOPED_TRACE(each.name());
    auto whole = make_gpt(each);
    const ParallelMeshes meshes(mesh);
    auto gpt = make_split(each, meshes);
    for (const auto scheme : {ContextParallel::kAllGather, ContextParallel::kRing}) {
      const auto loss = sum_over_ranks(to_local(loss_of_part(gpt, rows, meshes, scheme))) / static_cast<double>(mesh[3]);
      EXPECT_NEAR(loss, item(loss_of_whole(whole, rows)), kBound);
    }
  }
}

/// Each rank exchanges keys and values of its own heads alone.
TEST(TensorAndContextParallel, SendsAPartOfTheHeads) {
  if (world_size() != 4) GTEST_SKIP() << "two ranks for either";
  const Case each{.mesh = {1, 1, 2, 2}};
  const ParallelMeshes meshes({1, 1, 2, 2});
  auto gpt = make_gpt(each);
  parallelize(*gpt, meshes.all["tp"], plan_of(each, 2));
  const Rows rows(0);
  for (int step = 0; step < 2; ++step) { // the second one has its communicators
    const CountCollectives counter;
    const torch::NoGradGuard no_grad;
    const auto parts = split_sequence({rows.tokens}, {1}, meshes.all["cp"], {.compares_values = false});
    const ContextParallelScope scope(ContextParallel::kAllGather, parts.mesh);
    const auto logits = gpt->forward(parts.tensors[0].local(), to_local(parts.positions));
    const int64_t layers = 2, width = 24, length = 24; // with padding
    const auto batch = counter.count(CollectiveKind::kAllGather).bytes - layers * 2 * kRows * length * width / 2 * 4;
    EXPECT_LE(batch, 64) << "beside keys and values, the ranks compare the shapes of the batch";
    EXPECT_EQ(counter.count(CollectiveKind::kAllReduce).bytes, (2 * layers + 1) * kRows * (length / 2) * width * 4);
  }
}

TEST(TensorAndContextParallel, SplitDTensorsAreAnError) {
  const ParallelMeshes meshes({1, 1, 1, world_size()});
  const Case each{.mesh = {1, 1, 1, world_size()}};
  auto gpt = make_gpt(each);
  parallelize(*gpt, meshes.all["tp"], plan_of(each, world_size()));
  const auto parts = split_sequence({Rows(0).tokens}, {1}, meshes.all["cp"]);
  EXPECT_THROWS_WITH(gpt->forward(parts.tensors[0], to_local(parts.positions)), "parts of sequences are plain");
}

TEST(TensorAndContextParallel, OneMeshForBothIsAnError) {
  const auto mesh = init_device_mesh(test_device_type(), {world_size()}, {"tp"});
  if (world_size() == 1) GTEST_SKIP() << "one rank shares itself alone";
  const auto heads = from_local(torch::randn({1, 1, 4, 2}), mesh, {Shard{1}});
  EXPECT_THROWS_WITH(context_parallel_attention(heads, heads, heads, mesh), "the sequence is split over");
}

TEST(TensorAndContextParallel, ConvolutionsOfPartsAreAnError) {
  const ParallelMeshes meshes({1, 1, 1, world_size()});
  torch::nn::Conv1d layer(4, 12, 3);
  parallelize(*layer, meshes.all["tp"], {{"", Colwise{}}});
  const auto parts = split_sequence({torch::randn({2, 4, 8})}, {2}, meshes.all["cp"]);
  const ContextParallelScope scope(ContextParallel::kRing, parts.mesh);
  EXPECT_THROWS_WITH(layer->forward(parts.tensors[0].local()), "this rank's part of the sequence alone");
}

} // namespace
} // namespace tessera::testing::tensor_parallel_test
