// Parameters that the program places on the shard dim itself.
#include <gtest/gtest.h>

#include <numeric>

#include <tessera/fsdp/meta_init.h>
#include <tessera/fsdp/options.h>

#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::placement_fn_test {
namespace {

using PlacementCase = std::pair<std::string, std::function<ShardPlacementFn(const torch::nn::Module&, int64_t ranks)>>;

std::optional<Placement> along_largest_dim(const std::string&, const torch::Tensor& parameter) {
  const auto sizes = parameter.sizes();
  return Shard{std::max_element(sizes.begin(), sizes.end()) - sizes.begin()};
}

/// Rows in blocks of four, as blockwise quantization wants them; the last takes the rest.
ShardPlacementFn in_blocks(int64_t ranks) {
  return [ranks](const std::string& name, const torch::Tensor& parameter) -> std::optional<Placement> {
    if (name.find("weight") == std::string::npos) return std::nullopt;
    RaggedShard blocks{0, {}};
    int64_t rest = parameter.size(0);
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const auto rows = rank + 1 == ranks ? rest : std::min(rest, parameter.size(0) / ranks / 4 * 4);
      blocks.extents.push_back(rows);
      rest -= rows;
    }
    return blocks;
  };
}

std::vector<PlacementCase> cases() {
  return {{"last dim",
           [](auto&, int64_t) {
             return [](const std::string&, const torch::Tensor&) -> std::optional<Placement> { return Shard{-1}; };
           }},
          {"largest dim", [](auto&, int64_t) { return along_largest_dim; }},
          {"blocks of rows", [](auto&, int64_t ranks) { return in_blocks(ranks); }},
          {"whole matrices", [](auto& module, int64_t ranks) { return whole_on_one_rank(module.parameters(), ranks); }}};
}

/// The ranks of the shard dim.
int64_t shard_ranks(const Strategy& strategy) {
  const auto mesh = strategy.mesh();
  return strategy.options.strategy == tessera::Strategy::kHierarchical ? mesh.size() : mesh.size(mesh.ndim() - 1);
}

void shard_placed(Net& net, const Strategy& strategy, const PlacementCase& placed) {
  const auto mesh = strategy.mesh();
  const auto wrap = [&](torch::nn::Module& module) {
    auto options = strategy.options;
    options.shard_placement_fn = placed.second(module, shard_ranks(strategy));
    fully_shard(module, mesh, options);
  };
  for (auto& block : *net->blocks) wrap(*block);
  wrap(*net);
}

std::vector<Strategy> sharding_strategies() {
  auto all = strategies();
  std::erase_if(all, [](const auto& each) { return each.replicates || each.name.ends_with("ragged"); });
  return all;
}

TEST(ShardPlacementFn, EveryPlacementTrainsAsTheUnshardedModel) {
  for (const auto& placed : cases()) {
    for (const auto& strategy : sharding_strategies()) {
      SCOPED_TRACE(placed.first + ", " + strategy.name);
      Net net = make_net(), plain = make_net();
      shard_placed(net, strategy, placed);
      torch::optim::AdamW ours(net->parameters(), 1e-2), theirs(plain->parameters(), 1e-2);
      for (int64_t step = 0; step < 3; ++step) {
        ours.zero_grad();
        theirs.zero_grad();
        const auto loss = loss_of(net, own_batch(step));
        const auto expected = loss_of(plain, global_batch(step));
        EXPECT_NEAR(mean_over_ranks(loss).item<double>(), expected.item<double>(), 1e-5);
        loss.backward();
        expected.backward();
        EXPECT_NEAR(torch::nn::utils::clip_grad_norm_(net->parameters(), 0.5),
                    torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.5), 1e-5);
        ours.step();
        theirs.step();
      }
      EXPECT_LE(parameter_difference(*net, *plain), 2e-4); // Adam magnifies what rounds a small gradient
      for (const auto& parameter : net->parameters()) {
        EXPECT_TRUE(DTensor(parameter).local().is_contiguous());
        EXPECT_TRUE(DTensor(parameter.grad()).local().is_contiguous());
      }
    }
  }
}

TEST(ShardPlacementFn, GivesDTensorsOfThePlacement) {
  torch::manual_seed(0);
  torch::nn::Linear linear(6, 5), other(6, 5);
  const auto whole = linear->weight.detach().clone();
  const auto fn = [](const std::string& name, const torch::Tensor&) -> std::optional<Placement> {
    return name == "weight" ? std::optional<Placement>(Shard{1}) : std::nullopt;
  };
  fully_shard(linear, world_mesh(), {.shard_placement_fn = fn});
  EXPECT_EQ(DTensor(linear->weight).placements()[0], Placement(Shard{1}));
  EXPECT_EQ(DTensor(linear->bias).placements()[0], Placement(Shard{0}));
  EXPECT_TENSORS_EQUAL(full(linear->weight), whole);
  const auto chunks = whole.chunk(world_size(), 1);
  if (static_cast<size_t>(world_rank()) < chunks.size())
    EXPECT_TENSORS_EQUAL(DTensor(linear->weight).local(), chunks[static_cast<size_t>(world_rank())]);
  {
    const torch::NoGradGuard no_grad;
    linear->weight.copy_(whole * 3);
  }
  EXPECT_TENSORS_EQUAL(full(linear->weight), whole * 3);
}

TEST(ShardPlacementFn, WholeMatricesAreBalanced) {
  std::vector<torch::Tensor> matrices;
  for (const int64_t size : {8, 6, 6, 4, 2, 2}) matrices.push_back(torch::empty({size, 10}));
  matrices.push_back(torch::empty({7}));
  const auto fn = whole_on_one_rank(matrices, 2);
  std::vector<int64_t> rows(2, 0);
  for (const auto& matrix : matrices) {
    const auto placement = fn("", matrix).placement;
    if (matrix.dim() == 1) {
      EXPECT_FALSE(placement.has_value());
      continue;
    }
    const auto& extents = std::get<RaggedShard>(*placement).extents;
    EXPECT_EQ(std::count(extents.begin(), extents.end(), 0), 1);
    for (size_t rank = 0; rank < 2; ++rank) rows[rank] += extents[rank];
  }
  EXPECT_EQ(rows, (std::vector<int64_t>{14, 14}));
  EXPECT_FALSE(fn("", torch::empty({3, 3})).placement.has_value()) << "not one of them";
}

TEST(ShardPlacementFn, PlacesMatricesWithoutElements) {
  struct EmptyImpl : torch::nn::Module {
    torch::Tensor rows = register_parameter("rows", torch::ones({3, 0}));
    torch::Tensor none = register_parameter("none", torch::ones({0, 3}));
    torch::Tensor deep = register_parameter("deep", torch::ones({2, 0, 3}));
  } module;
  fully_shard(module, world_mesh(), {.shard_placement_fn = whole_on_one_rank(module.parameters(), world_size())});
  const auto expected = [](int64_t rows) { return world_rank() == 0 ? rows : 0; };
  EXPECT_EQ(DTensor(module.rows).local().sizes(), (std::vector<int64_t>{expected(3), 0}));
  EXPECT_EQ(DTensor(module.none).local().sizes(), (std::vector<int64_t>{0, 3}));
  EXPECT_EQ(DTensor(module.deep).local().sizes(), (std::vector<int64_t>{expected(2), 0, 3}));
  EXPECT_EQ(full(module.rows).sizes(), (std::vector<int64_t>{3, 0}));
  module.rows.sum().backward();
  EXPECT_EQ(full(module.rows.grad()).sizes(), (std::vector<int64_t>{3, 0}));
}

TEST(ShardPlacementFn, ComputesOnAWholeMatrixWhereItLies) {
  torch::manual_seed(0);
  torch::nn::Linear linear(6, 4);
  const auto whole = linear->weight.detach().clone();
  fully_shard(linear, world_mesh(), {.shard_placement_fn = whole_on_one_rank(linear->parameters(), world_size())});
  const auto local = DTensor(linear->weight).local();
  EXPECT_EQ(local.size(0), world_rank() == 0 ? 4 : 0);
  if (world_rank() == 0) EXPECT_TENSORS_EQUAL(local, whole);
}

TEST(ShardPlacementFn, PlacesWhatIsMaterialized) {
  auto linear = on_meta([] { return torch::nn::Linear(6, 5); });
  fully_shard(linear, world_mesh(), {.shard_placement_fn = [](auto&, auto& parameter) -> std::optional<Placement> {
                return Shard{parameter.dim() - 1};
              }});
  materialize(*linear, [](torch::nn::Module& module) {
    for (auto& parameter : module.parameters()) torch::nn::init::ones_(parameter);
  });
  EXPECT_TENSORS_EQUAL(linear->forward(torch::ones({1, 6}, test_device())).detach(), torch::full({1, 5}, 7.0));
}

TEST(ShardPlacementFn, SaysWhatIsWrong) {
  torch::manual_seed(1);
  torch::nn::Linear linear(6, 5);
  const auto error = [&](const Placement& placement) {
    const FullyShardOptions options{.initial_weights = InitialWeights::kUnchecked,
                                    .shard_placement_fn = [&](auto&, auto&) { return std::optional<Placement>(placement); }};
    return error_of([&] { fully_shard(linear, world_mesh(), options); });
  };
  const auto has = [](const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; };
  EXPECT_TRUE(has(error(Shard{2}), "gave the parameter weight of shape [5, 6] the placement Shard(2), but it has 2 dims"));
  EXPECT_TRUE(has(error(Shard{-3}), "the placement Shard(-3), but it has 2 dims"));
  EXPECT_TRUE(has(error(Partial{}), "which does not split it"));
  EXPECT_TRUE(has(error(StridedShard{0, 2}), "which a group cannot have: choose Shard, RaggedShard or Replicate"));
  EXPECT_TRUE(has(error(RaggedShard{0, std::vector<int64_t>(5, 1)}), c10::str("5 extents for ", world_size(), " ranks")));
  std::vector<int64_t> extents(static_cast<size_t>(world_size()), 0);
  extents[0] = 6;
  EXPECT_TRUE(has(error(RaggedShard{0, extents}), "whose extents are not 5 in sum"));
  extents[0] = -1;
  EXPECT_TRUE(has(error(RaggedShard{0, extents}), "whose extents are not 5 in sum"));
  EXPECT_FALSE(is_sharded(*linear));
  const FullyShardOptions replicated{.shard_placement_fn = [](auto&, auto&) { return std::optional<Placement>(Shard{0}); }};
  EXPECT_THROWS_WITH(replicate(linear, world_mesh(), replicated), "the strategy no-shard splits no parameter");
  EXPECT_THROWS_WITH(whole_on_one_rank({}, 0), "there are 0 ranks");
  if (world_size() == 1) return;
  const FullyShardOptions differing{.initial_weights = InitialWeights::kUnchecked,
                                    .shard_placement_fn = [](auto&, auto& parameter) -> std::optional<Placement> {
                                      return Shard{world_rank() == 0 ? 0 : parameter.dim() - 1};
                                    }};
  EXPECT_THROWS_WITH(fully_shard(linear, world_mesh(), differing), "the ranks' models or options differ");
}

TEST(ShardPlacementFn, ThatThrowsOnOneRankIsAnErrorOnEveryRank) {
  torch::manual_seed(0);
  torch::nn::Linear linear(6, 5);
  for (const bool everywhere : {false, true}) {
    const auto throws = [=](const std::string& name, const torch::Tensor&) -> std::optional<Placement> {
      if (name == "bias" && (everywhere || world_rank() == world_size() - 1)) throw std::out_of_range("there is no dim for it");
      return Shard{0};
    };
    const auto message = error_of([&] { fully_shard(linear, world_mesh(), {.shard_placement_fn = throws}); });
    if (everywhere || world_rank() == world_size() - 1) {
      EXPECT_EQ(message, "there is no dim for it");
    } else {
      EXPECT_NE(message.find("shard_placement_fn threw for bias: there is no dim for it"), std::string::npos) << message;
    }
    EXPECT_FALSE(is_sharded(*linear));
  }
  fully_shard(linear, world_mesh());
}

} // namespace
} // namespace tessera::testing::placement_fn_test
