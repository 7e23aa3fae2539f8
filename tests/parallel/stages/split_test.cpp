// Models as lists of layers, and their cuts into stages.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/checkpoint/state_dict.h>
#include <tessera/fsdp/meta_init.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/parallel/pipeline_schedule.h>
#include <tessera/parallel/pipeline_stages.h>

#include <tessera/tests/parallel/pipeline_gpt.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing::split_test {
namespace {

using ::testing::HasSubstr;

DeviceMesh pipeline_mesh() { return init_device_mesh(torch::kCPU, {world_size()}, {"pp"}); }

std::vector<std::string> names_of(const torch::nn::Module& module) {
  std::vector<std::string> names;
  for (const auto& item : module.named_parameters()) names.push_back(item.key());
  return names;
}

/// What each layer of a chain of Linears of these widths is.
struct ChainImpl : torch::nn::Module {
  explicit ChainImpl(const std::vector<int64_t>& widths) : layers(register_module("layers", torch::nn::Sequential())) {
    for (size_t i = 0; i + 1 < widths.size(); ++i) layers->push_back(torch::nn::Linear(widths[i], widths[i + 1]));
  }
  torch::nn::Sequential layers;
};
TORCH_MODULE(Chain);

TEST(Split, KeepsNamesAndDropsTheStagesOfOthers) {
  auto model = seeded_pipeline_gpt();
  const auto whole = names_of(*model);
  const auto before = model->tokens->weight.detach().clone();
  const auto stages = split(layers_of(model), pipeline_mesh());
  EXPECT_EQ(stages.count(), world_size());
  ASSERT_EQ(stages.local.size(), 1U);
  EXPECT_EQ(stages.local[0].index, world_rank());
  for (const auto& name : names_of(*stages.module)) EXPECT_THAT(whole, ::testing::Contains(name));
  int64_t elements = 0;
  for (const auto& item : model->named_parameters()) {
    const bool is_here = stages.module->named_parameters().contains(item.key());
    EXPECT_EQ(item.value().is_meta(), !is_here) << item.key();
    if (is_here) EXPECT_TRUE(item.value().is_same(stages.module->named_parameters()[item.key()]));
    elements += is_here ? item.value().numel() : 0;
  }
  const bool holds_tie = world_rank() == 0 || world_rank() == last_rank();
  EXPECT_EQ(stages.module->named_parameters().contains("tokens.weight"), holds_tie);
  if (holds_tie) EXPECT_TENSORS_EQUAL(model->tokens->weight.detach(), before);
  EXPECT_EQ(stages.ties.size(), world_size() > 1 ? 1U : 0U);
  EXPECT_EQ(stages.is_copy("tokens.weight"), world_size() > 1 && world_rank() == last_rank());
  EXPECT_EQ(stages.is_copy("optimizer.state.tokens.weight.exp_avg"), world_size() > 1 && world_rank() == last_rank());
  EXPECT_FALSE(stages.is_copy("places.weight"));
  auto sum = torch::tensor({elements - (stages.is_copy("tokens.weight") ? model->tokens->weight.numel() : 0)});
  stages.mesh.communicator()->all_reduce(sum, ReduceOp::kSum, "elements").wait();
  EXPECT_EQ(sum.item<int64_t>(), [&] {
    int64_t all = 0;
    for (const auto& each : model->parameters()) all += each.numel();
    return all;
  }());
}

TEST(Split, CutsWhereTheDearestStageIsCheapest) {
  const auto mesh = pipeline_mesh();
  Chain chain(std::vector<int64_t>{4, 64, 64, 4, 4, 4, 4, 4, 4});
  PipelineLayers layers(*chain);
  layers.add_sequential("layers");
  const auto ranks = world_size();
  const auto stages = split(layers, mesh);
  const std::vector<std::vector<int64_t>> bounds{{0, 8}, {0, 1, 8}, {0, 1, 2, 8}, {0, 1, 2, 3, 8}};
  const double dearest = *std::max_element(stages.costs.begin(), stages.costs.end());
  EXPECT_EQ(dearest, ranks == 1 ? 320 + 4160 + 260 + 5 * 20 : ranks == 2 ? 4160 + 320 : 4160) << to_string(stages);
  EXPECT_EQ(stages.bounds.back(), 8);
  EXPECT_THAT(to_string(stages), HasSubstr("layers.0"));
  const auto by_time = split(layers, mesh, {.costs = std::vector<double>(8, 1.0)});
  for (const auto cost : by_time.costs) EXPECT_LE(cost, (8 + ranks - 1) / ranks);
  std::vector<int64_t> inner;
  for (int64_t i = 1; i < ranks; ++i) inner.push_back(i);
  EXPECT_EQ(split(layers, mesh, {.bounds = inner}).bounds.size(), static_cast<size_t>(ranks) + 1);
}

TEST(Split, PutsStagesWhereAScheduleWants) {
  const auto ranks = world_size();
  auto model = seeded_pipeline_gpt({.depth = 6});
  const auto schedule = pipeline_schedule(PipelineScheduleKind::kZeroBubbleV, {.ranks = ranks, .micro_batches = 2, .chunks = 2});
  const auto stages = split(layers_of(model), pipeline_mesh(), {.rank_of_stage = schedule.rank_of_stage});
  ASSERT_EQ(stages.local.size(), 2U);
  EXPECT_EQ(stages.local[1].index, 2 * ranks - 1 - world_rank());
  ASSERT_EQ(stages.ties.size(), 1U);
  EXPECT_EQ(stages.ties[0].ranks, std::vector<int64_t>{0});
  EXPECT_EQ(stages.ties[0].stages, (std::vector<int64_t>{0, 2 * ranks - 1}));
  EXPECT_FALSE(stages.is_copy("tokens.weight"));
  // A parameter that both of the rank's stages have is one, and listed once under each.
  EXPECT_EQ(stages.module->named_parameters().contains("tokens.weight"), world_rank() == 0);
  auto other = seeded_pipeline_gpt({.depth = 6});
  EXPECT_EQ(split(layers_of(other), pipeline_mesh(), {.chunks = 2}).local[1].index, world_rank() + ranks);
}

TEST(Split, LeavesWhatIsOnTheMetaDeviceThere) {
  auto model = on_meta([] { return PipelineGpt(PipelineGptOptions{}); });
  const auto stages = split(layers_of(model), pipeline_mesh());
  for (const auto& each : model->parameters()) EXPECT_TRUE(each.is_meta());
  materialize(*stages.module, [](torch::nn::Module& module) {
    for (auto& each : module.parameters(/*recurse=*/false)) each.fill_(0.5);
  });
  for (const auto& item : model->named_parameters()) {
    const bool is_here = stages.module->named_parameters().contains(item.key());
    EXPECT_EQ(item.value().is_meta(), !is_here) << item.key();
  }
}

TEST(Split, NamesTheParameterOfAnotherStageThatIsRead) {
  if (world_size() == 1) return;
  auto model = seeded_pipeline_gpt({.ties = false});
  const auto stages = split(layers_of(model), pipeline_mesh());
  if (world_rank() == 0) {
    EXPECT_THROWS_WITH(model->head(torch::ones({2, PipelineGptImpl::kWidth})), "reads head.weight of stage ");
  } else {
    EXPECT_THROWS_WITH(model->tokens(torch::zeros({2}, torch::kLong)), "no stage reads tokens.weight of stage 0 (layer");
    EXPECT_THROWS_WITH(model->tokens->weight + 1, "PipelineLayers::tie");
  }
  EXPECT_EQ(model->tokens->weight.size(0), PipelineGptImpl::kVocabulary); // its shape is no read
}

TEST(Split, RefusesWhatDoesNotFit) {
  const auto mesh = pipeline_mesh();
  const auto ranks = world_size();
  auto model = seeded_pipeline_gpt();
  if (ranks > 1) {
    EXPECT_THROWS_WITH(split(layers_of(model, /*declares_tie=*/false), mesh),
                       c10::str("tokens.weight is a parameter of the layers 'embed' (stage 0), 'head' (stage ", ranks - 1, ")"));
  }
  EXPECT_THROWS_WITH(split(layers_of(model), mesh, {.chunks = 9}), "6 layers are fewer than the");
  EXPECT_THROWS_WITH(split(layers_of(model), mesh, {.costs = {1, 2}}), "2 costs for 6 layers");
  EXPECT_THROWS_WITH(split(layers_of(model), mesh, {.bounds = std::vector<int64_t>(static_cast<size_t>(ranks), 1)}),
                     c10::str(ranks, " bounds for ", ranks, " stages"));
  if (ranks == 2) EXPECT_THROWS_WITH(split(layers_of(model), mesh, {.bounds = {6}}), "bounds must rise");
  PipelineLayers layers(*model);
  EXPECT_THROWS_WITH(layers.add("embed", {"tokenz"}, [](const torch::Tensor& x) { return x; }), "the nearest is 'tokens'");
  EXPECT_THROWS_WITH(layers.add_sequential("blocks"), "is no Sequential");
  EXPECT_THROWS_WITH(layers.tie("token.weight"), "the nearest name is 'tokens.weight'");
  EXPECT_THROWS_WITH(layers.add_list("blocks", [](torch::nn::LinearImpl&, const torch::Tensor& x) { return x; }),
                     "blocks.0' is no torch::nn::LinearImpl");
  layers.add("embed", {"tokens", "places"}, [](const torch::Tensor& x) { return x; });
  EXPECT_THROWS_WITH(layers.add("embed", {}, [](const torch::Tensor& x) { return x; }), "two layers of a pipeline");
  for (int64_t i = 0; i < 8; ++i) layers.add(c10::str("relu", i), {}, [](const torch::Tensor& x) { return x.relu(); });
  EXPECT_THROWS_WITH(split(layers, mesh), "members of no layer:\n  blocks.0");
  Chain one(std::vector<int64_t>{3, 3});
  PipelineLayers few(*one);
  few.add_sequential("layers");
  for (int64_t i = 0; i < 4; ++i) few.add(c10::str("relu", i), {}, [](const torch::Tensor& x) { return x.relu(); });
  if (ranks > 1)
    EXPECT_THROWS_WITH(split(few, mesh), c10::str(ranks, " stages need parameters each, and of the 5 layers 1 have"));
  if (ranks == 2) EXPECT_THROWS_WITH(split(few, mesh, {.bounds = {2}}), "stage 1 (layers 2 to 4) has no parameters");
  for (const auto& each : model->parameters()) EXPECT_FALSE(each.is_meta()); // nothing changed
}

TEST(Split, ComparesTheListsOfAllRanks) {
  if (world_size() == 1) return;
  Chain chain(std::vector<int64_t>{3, world_rank() == 1 ? 5 : 4, 3, 3, 3});
  PipelineLayers layers(*chain);
  layers.add_sequential("layers");
  EXPECT_THROWS_WITH(split(layers, pipeline_mesh()), "the ranks of the pipeline have different layers: rank 0 has");
}

TEST(TimeLayers, GivesEachLayerATime) {
  const auto mesh = pipeline_mesh();
  auto model = on_meta([] { return PipelineGpt(PipelineGptOptions{.depth = 2}); });
  const auto layers = layers_of(model);
  const TextBatch batch(torch::ones({2, 4}, torch::kLong), torch::ones({2, 4}, torch::kLong));
  const auto seconds = time_layers(layers, batch, mesh);
  ASSERT_EQ(seconds.size(), 4U);
  for (const auto each : seconds) EXPECT_GT(each, 0);
  for (const auto& each : model->parameters()) EXPECT_TRUE(each.is_meta() && !each.grad().defined());
  const auto stages = split(layers, mesh, {.costs = seconds}); // which every rank has alike
  EXPECT_EQ(stages.count(), world_size());
}

} // namespace
} // namespace tessera::testing::split_test
