// Which dims of a mesh shard and which replicate, the collectives that follow, and training on meshes of more dims.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <string>
#include <vector>

#include <tessera/fsdp/clip_grad.h>
#include <tessera/fsdp/group/parameter_group.h>
#include <tessera/fsdp/layout/mesh_roles.h>
#include <tessera/fsdp/layout/stages.h>
#include <tessera/fsdp/model/sharded_module.h>

#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>

namespace tessera::testing::mesh_roles_test {
namespace {

using enum tessera::Strategy;
using internal::MeshRoles;
using internal::Stage;
using Kind = Stage::Kind;
using Kept = Stage::Kept;

struct ExpectedStage {
  Kind kind;
  Kept kept;
  int64_t ranks;
  friend bool operator==(const ExpectedStage&, const ExpectedStage&) = default;
};

std::vector<ExpectedStage> stages_of(const std::vector<Stage>& stages) {
  std::vector<ExpectedStage> all;
  for (const auto& stage : stages) all.push_back({stage.kind, stage.kept, stage.ranks()});
  return all;
}

/// What the table of stages.h says, for so many ranks between the groups and inside one.
std::vector<ExpectedStage> expected_gathers(tessera::Strategy strategy, int64_t outer, int64_t inner) {
  const bool stays = strategy == kZero1 || strategy == kZero2;
  std::vector<ExpectedStage> all{
      {Kind::kAllGather, stays ? Kept::kUntilWritten : Kept::kNothing, strategy == kNoShard ? 1 : inner}};
  if (strategy == kHierarchical && outer > 1) all.insert(all.begin(), {Kind::kAllGather, Kept::kUntilWritten, outer});
  return all;
}

std::vector<ExpectedStage> expected_reductions(tessera::Strategy strategy, int64_t outer, int64_t inner) {
  std::vector<ExpectedStage> all;
  const bool reduces_whole = strategy == kNoShard;
  if (inner > 1)
    all.push_back(
        {reduces_whole ? Kind::kAllReduce : Kind::kReduceScatter, reduces_whole ? Kept::kUntilAllReduce : Kept::kNothing, inner});
  const bool is_hybrid = strategy == kHybridShard;
  if (outer > 1) all.push_back({is_hybrid ? Kind::kAllReduce : Kind::kReduceScatter, Kept::kUntilAllReduce, outer});
  return all;
}

std::vector<std::vector<int64_t>> shapes_of_two() {
  const auto n = world_size();
  std::vector<std::vector<int64_t>> shapes{{1, n}, {n, 1}};
  if (n == 4) shapes.push_back({2, 2});
  return shapes;
}

TEST(MeshRoles, GiveTheStagesOfTheTable) {
  for (const auto& row : kStrategies) {
    const auto shapes = row.outer ? shapes_of_two() : std::vector<std::vector<int64_t>>{{world_size()}};
    for (const auto& shape : shapes) {
      SCOPED_TRACE(c10::str(row.name, " over ", c10::IntArrayRef(shape)));
      const MeshRoles roles(init_device_mesh(test_device_type(), shape), row.strategy);
      const auto stages = internal::connect_stages(roles, {}, CommunicatorUse::kSeparate);
      const int64_t outer = row.outer ? shape[0] : 1;
      EXPECT_EQ(stages_of(stages.gathers), expected_gathers(row.strategy, outer, shape.back()));
      EXPECT_EQ(stages_of(stages.reductions), expected_reductions(row.strategy, outer, shape.back()));
      EXPECT_EQ(stages.reducing_ranks(), world_size());
      EXPECT_EQ(roles.keeps_parameters(), row.strategy == kZero1 || row.strategy == kZero2);
      EXPECT_EQ(roles.keeps_gradients(), row.strategy == kNoShard || row.strategy == kZero1);
      EXPECT_EQ(roles.is_first_rank(), world_rank() == 0);
    }
  }
}

TEST(MeshRoles, ANumberOfRanksAfterForwardIsALastStage) {
  if (world_size() != 4) GTEST_SKIP() << "2 of 4 ranks";
  const MeshRoles roles(world_mesh(), kFullShard);
  const auto stages = internal::connect_stages(roles, ReshardAfterForward(2), CommunicatorUse::kSeparate);
  EXPECT_EQ(stages_of(stages.gathers),
            (std::vector<ExpectedStage>{{Kind::kAllGather, Kept::kNothing, 4}, {Kind::kAllGather, Kept::kAfterForward, 2}}));
  EXPECT_EQ(stages.innermost(), 0);
  EXPECT_FALSE(stages.follows(1)) << "it starts from what a forward leaves";
}

/// The ranks that lie along the named dims of `mesh` with this one, whichever place the dims have in it.
std::vector<int64_t> ranks_along(const DeviceMesh& mesh, const std::vector<std::string>& names) {
  auto ranks = mesh[names].ranks();
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

std::vector<int64_t> sorted_ranks(const DeviceMesh& mesh) {
  auto ranks = mesh.ranks();
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

/// Meshes of four dims that hold all ranks, with at most two dims of more than one rank.
std::vector<std::vector<int64_t>> shapes_of_four() {
  const auto n = world_size();
  std::vector<std::vector<int64_t>> shapes;
  for (size_t dim = 0; dim < 4; ++dim) {
    shapes.emplace_back(4, 1);
    shapes.back()[dim] = n;
  }
  for (size_t one = 0; n == 4 && one < 4; ++one) {
    for (size_t other = one + 1; other < 4; ++other) {
      shapes.emplace_back(4, 1);
      shapes.back()[one] = shapes.back()[other] = 2;
    }
  }
  return shapes;
}

struct NamedCase {
  tessera::Strategy strategy;
  DataParallelDims dims;
};

/// Of a mesh with the dims a, b, c and d. Its outer dims may come behind the inner ones.
std::vector<NamedCase> named_cases() {
  return {{kFullShard, {.outer = {}, .inner = {"a"}}},
          {kFullShard, {.outer = {}, .inner = {"d", "b"}}},
          {kNoShard, {.outer = {}, .inner = {"b", "c"}}},
          {kZero1, {.outer = {}, .inner = {"c", "d"}}},
          {kZero2, {.outer = {}, .inner = {"b"}}},
          {kHybridShard, {.outer = {"a", "b"}, .inner = {"c"}}},
          {kHybridShard, {.outer = {"d"}, .inner = {"a"}}},
          {kHybridShard, {.outer = {"b"}, .inner = {"c", "d"}}},
          {kHierarchical, {.outer = {"a"}, .inner = {"b", "c"}}},
          {kHierarchical, {.outer = {"c", "d"}, .inner = {"b"}}}};
}

std::string describe(const NamedCase& each, const std::vector<int64_t>& shape) {
  return c10::str(row_of(each.strategy).name, " of ", c10::IntArrayRef(shape), ", outer ", c10::Join(" ", each.dims.outer),
                  ", inner ", c10::Join(" ", each.dims.inner));
}

const std::vector<std::string> kNames{"a", "b", "c", "d"};

TEST(MeshRoles, AreOfTheNamedDims) {
  for (const auto& shape : shapes_of_four()) {
    const auto mesh = init_device_mesh(test_device_type(), shape, kNames);
    for (const auto& each : named_cases()) {
      SCOPED_TRACE(describe(each, shape));
      const MeshRoles roles(mesh, each.strategy, each.dims);
      auto all = each.dims.outer;
      all.insert(all.end(), each.dims.inner.begin(), each.dims.inner.end());
      std::sort(all.begin(), all.end());
      auto inner = each.dims.inner, outer = each.dims.outer;
      std::sort(inner.begin(), inner.end());
      std::sort(outer.begin(), outer.end());
      EXPECT_EQ(roles.data_parallel(), mesh[all]);
      EXPECT_EQ(sorted_ranks(roles.mesh()), ranks_along(mesh, all));
      EXPECT_EQ(sorted_ranks(roles.roles().back().ranks), ranks_along(mesh, inner));
      ASSERT_EQ(roles.roles().size(), outer.empty() ? 1 : 2);
      if (!outer.empty()) EXPECT_EQ(sorted_ranks(roles.roles()[0].ranks), ranks_along(mesh, outer));
      const auto placements = roles.placements(Shard{0});
      const auto split = std::count(placements.begin(), placements.end(), Placement(Shard{0}));
      EXPECT_EQ(split, each.strategy == kNoShard ? 0 : 1);
      const int64_t replicas = each.strategy == kHybridShard ? roles.roles()[0].ranks.size() : 1;
      EXPECT_EQ(roles.shard_ranks(), each.strategy == kNoShard ? 1 : roles.data_parallel().size() / replicas);
    }
  }
}

/// Where this rank is among those of `mesh`.
int64_t number_in(const DeviceMesh& mesh) {
  const auto& ranks = mesh.ranks();
  return std::find(ranks.begin(), ranks.end(), world_rank()) - ranks.begin();
}

/// Steps of clipped SGD, which shows each factor of a gradient, beside one process that shards nothing.
void compare(const DeviceMesh& mesh, const FullyShardOptions& options, const DeviceMesh& data_parallel) {
  Net net = make_net(), twin = make_net();
  shard_model(net, {"", [&] { return mesh; }, options});
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
  torch::optim::SGD reference(twin->parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
  for (int64_t step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    reference.zero_grad();
    loss_of(net, part_of(global_batch(step), number_in(data_parallel), data_parallel.size())).backward();
    loss_of(twin, global_batch(step)).backward();
    const auto norm = clip_grad_norm_(*net, 0.5).item<double>(), expected = clip_grad_norm_(*twin, 0.5).item<double>();
    EXPECT_NEAR(norm, expected, 1e-4 * expected) << "step " << step;
    optimizer.step();
    reference.step();
  }
  EXPECT_LT(parameter_difference(*net, *twin), 1e-5);
}

TEST(MeshRoles, TrainAsOneProcessOverNamedDims) {
  const auto is_square = [](const auto& shape) { return shape == std::vector<int64_t>{2, 2, 1, 1}; };
  for (const auto& shape : sweep(shapes_of_four(), 4, is_square)) {
    const auto mesh = init_device_mesh(test_device_type(), shape, kNames);
    for (const auto& each : named_cases()) {
      for (const auto layout : {BufferLayout::kRagged, BufferLayout::kPerParameter}) {
        SCOPED_TRACE(c10::str(describe(each, shape), layout == BufferLayout::kRagged ? ", ragged" : ", per parameter"));
        const FullyShardOptions options{.strategy = each.strategy, .data_parallel_dims = each.dims, .layout = layout};
        compare(mesh, options, MeshRoles(mesh, each.strategy, each.dims).data_parallel());
      }
    }
  }
}

TEST(MeshRoles, AStrategyFollowsFromTheNamedDims) {
  const auto mesh = init_device_mesh(test_device_type(), {1, world_size(), 1}, {"a", "b", "c"});
  torch::manual_seed(0); // the same weights on all ranks
  torch::nn::Linear inner(3, 2), both(3, 2);
  const auto strategy_of = [](const FSDPModule& module) { return module.state()->roles().strategy(); };
  EXPECT_EQ(strategy_of(fully_shard(*inner, mesh, {.data_parallel_dims = DataParallelDims{.outer = {}, .inner = {"b"}}})),
            kFullShard);
  EXPECT_EQ(strategy_of(fully_shard(*both, mesh, {.data_parallel_dims = DataParallelDims{.outer = {"a"}, .inner = {"b"}}})),
            kHybridShard);
}

TEST(MeshRoles, WrongDimsAreErrorsThatNameThem) {
  const auto mesh = init_device_mesh(test_device_type(), {1, world_size(), 1}, {"a", "b", "c"});
  torch::manual_seed(0);
  torch::nn::Linear linear(3, 2);
  const auto error = [&](const DataParallelDims& dims, std::optional<tessera::Strategy> strategy = {}) {
    return error_of([&] { fully_shard(*linear, mesh, {.strategy = strategy, .data_parallel_dims = dims}); });
  };
  EXPECT_THAT(error({.outer = {}, .inner = {"x"}}),
              ::testing::HasSubstr("data_parallel_dims names the dim \"x\", which " + mesh.to_string() + " does not have"));
  EXPECT_THAT(error({.outer = {"a"}, .inner = {}}), ::testing::HasSubstr("data_parallel_dims names no inner dim"));
  EXPECT_THAT(error({.outer = {"b"}, .inner = {"a", "b"}}), ::testing::HasSubstr("data_parallel_dims names the dim \"b\" of"));
  EXPECT_THAT(error({.outer = {}, .inner = {"b"}}, kHierarchical),
              ::testing::HasSubstr("the strategy hierarchical takes outer dims, but data_parallel_dims names 0"));
  EXPECT_THAT(error({.outer = {"a"}, .inner = {"b"}}, kZero2),
              ::testing::HasSubstr("the strategy zero-2 takes no outer dims, but data_parallel_dims names 1"));
  EXPECT_FALSE(is_sharded(*linear)) << "an error leaves the module as it was";
}

} // namespace
} // namespace tessera::testing::mesh_roles_test
