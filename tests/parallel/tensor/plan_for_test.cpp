// Plans that are guessed from the names of layers.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <embed_minilm/bert.h>
#include <tessera/dtensor/debug.h>
#include <tessera/parallel/plan_for.h>

#include <tessera/tests/parallel/parallel_gpt.h>
#include <tessera/tests/support/matchers.h>

#include <algorithm>
#include <string>
#include <vector>

namespace tessera::testing::plan_for_test {
namespace {

namespace nn = torch::nn;

DeviceMesh tensor_mesh() { return init_device_mesh(test_device_type(), {world_size()}, {"tp"}); }

std::vector<std::string> lines_of(const ParallelPlan& plan) {
  std::vector<std::string> lines;
  for (const auto& line : plan) lines.push_back(to_string(ParallelPlan{line}));
  std::sort(lines.begin(), lines.end());
  return lines;
}

TEST(PlanFor, TheGptIsItsOwn) {
  auto model = seeded_gpt(small_gpt());
  EXPECT_EQ(lines_of(plan_for(*model, {.ranks = 4})), lines_of(gpt_plan()));
  auto guessed = lines_of(plan_for(*model, {.ranks = 4, .sequence = true}));
  auto expected = lines_of(gpt_plan(true));
  std::erase_if(expected, [](const auto& line) { return line.find("_norm") != std::string::npos; });
  expected.emplace_back("blocks.*.attention_norm: Sequence(dim 1)\n");
  expected.emplace_back("blocks.*.mlp_norm: Sequence(dim 1)\n");
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(guessed, expected);
}

TEST(PlanFor, LeavesOutWhatTheRanksDoNotDivide) {
  nn::ModuleList layers;
  layers->push_back(nn::ModuleDict(std::vector<std::pair<std::string, std::shared_ptr<nn::Module>>>{
      {"fc1", nn::Linear(4, 6).ptr()}, {"fc2", nn::Linear(6, 4).ptr()}}));
  layers->push_back(nn::ModuleDict(std::vector<std::pair<std::string, std::shared_ptr<nn::Module>>>{
      {"fc1", nn::Linear(4, 9).ptr()}, {"fc2", nn::Linear(9, 4).ptr()}}));
  EXPECT_EQ(to_string(plan_for(*layers, {.ranks = 3})), "*.fc1: Colwise\n*.fc2: Rowwise\n");
  EXPECT_EQ(to_string(plan_for(*layers, {.ranks = 2})), "0.fc1: Colwise\n0.fc2: Rowwise\n");
  EXPECT_EQ(to_string(plan_for(*layers, {.ranks = 4})), "");
  EXPECT_THROWS_WITH(plan_for(*layers, {.ranks = 0}), "plan_for: 0 ranks");
}

/// Heads of which nobody gets a part: keys' that the ranks do not divide are whole, and queries' stay out of the plan.
TEST(PlanFor, Heads) {
  const auto make = [](int64_t heads, int64_t key_heads) {
    return nn::ModuleDict(
        std::vector<std::pair<std::string, std::shared_ptr<nn::Module>>>{{"q_proj", nn::Linear(24, 4 * heads).ptr()},
                                                                         {"k_proj", nn::Linear(24, 4 * key_heads).ptr()},
                                                                         {"v_proj", nn::Linear(24, 4 * key_heads).ptr()},
                                                                         {"o_proj", nn::Linear(4 * heads, 24).ptr()}});
  };
  auto grouped = make(12, 2);
  EXPECT_EQ(to_string(plan_for(*grouped, {.ranks = 4, .heads = 12, .key_heads = 2})),
            "q_proj: Colwise(heads 12)\nk_proj: KeyHeads(2)\nv_proj: KeyHeads(2)\no_proj: Rowwise\n");
  parallelize(*grouped, tensor_mesh(), plan_for(*grouped, {.ranks = world_size(), .heads = 12, .key_heads = 2}));
  const auto is_split = 2 % world_size() == 0;
  EXPECT_EQ(DTensor(grouped->parameters()[2]).placements(), is_split ? Placements{Shard{0}} : Placements{Replicate{}});
  auto odd = make(6, 6);
  EXPECT_EQ(to_string(plan_for(*odd, {.ranks = 4})), "q_proj: Colwise\nk_proj: Colwise\nv_proj: Colwise\no_proj: Rowwise\n");
  EXPECT_EQ(to_string(plan_for(*odd, {.ranks = 4, .heads = 6})), "");
  EXPECT_THROWS_WITH(plan_for(*odd, {.ranks = 2, .heads = 6, .key_heads = 4}),
                     "plan_for: 6 heads of queries and 4 of keys: the queries of each key are a group of one size");
}

TEST(PlanFor, LibTorchsTransformer) {
  nn::Transformer make(nn::TransformerOptions(24, 12).num_encoder_layers(1).num_decoder_layers(1).dim_feedforward(36));
  EXPECT_EQ(lines_of(plan_for(*make, {.ranks = 4})),
            (std::vector<std::string>{
                "decoder.layers.*.linear1: Colwise\n", "decoder.layers.*.linear2: Rowwise\n",
                "decoder.layers.*.multihead_attn.out_proj: Rowwise\n", "decoder.layers.*.multihead_attn: Colwise\n",
                "decoder.layers.*.self_attn.out_proj: Rowwise\n", "decoder.layers.*.self_attn: Colwise\n",
                "encoder.layers.*.linear1: Colwise\n", "encoder.layers.*.linear2: Rowwise\n",
                "encoder.layers.*.self_attn.out_proj: Rowwise\n", "encoder.layers.*.self_attn: Colwise\n"}));
}

TEST(PlanFor, MiniLm) {
  minilm::BertConfig config;
  config.vocab_size = 50;
  config.hidden_size = 48;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 12;
  config.intermediate_size = 96;
  config.max_position_embeddings = 16;
  config.type_vocab_size = 2;
  const auto make = [&] {
    torch::manual_seed(21);
    minilm::Bert model(config);
    model->to(torch::kDouble);
    return model;
  };
  auto twin = make(), model = make();
  const auto plan = plan_for(*model, {.ranks = world_size()});
  EXPECT_EQ(plan.size(), 7) << to_string(plan);
  parallelize(*model, tensor_mesh(), plan);
  torch::manual_seed(22);
  const auto ids = torch::randint(50, {3, 9}, torch::kLong);
  auto mask = torch::ones({3, 9}, torch::kBool);
  mask.slice(0, 1, 2).slice(1, 6).fill_(false);
  const CountCollectives counter;
  const auto actual = model->forward(ids, mask);
  if (world_size() > 1) {
    EXPECT_EQ(counter.count(CollectiveKind::kAllReduce).calls, 2 * 2 + 1);
    EXPECT_EQ(counter.total_calls(), 2 * 2 + 1);
  }
  const auto expected = twin->forward(ids, mask);
  EXPECT_TENSORS_CLOSE(whole_of(actual), expected.detach(), 1e-10, 1e-12);
  actual.square().mean().backward();
  expected.square().mean().backward();
  const auto parameters = twin->named_parameters();
  for (const auto& item : model->named_parameters()) {
    const auto& wanted = parameters[item.key()].grad();
    ASSERT_EQ(item.value().grad().defined(), wanted.defined()) << item.key();
    if (wanted.defined()) EXPECT_TENSORS_CLOSE(whole_of(item.value().grad()), wanted, 1e-9, 1e-13) << item.key();
  }
}

} // namespace
} // namespace tessera::testing::plan_for_test
