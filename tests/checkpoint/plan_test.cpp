#include <tessera/checkpoint/plan.h>

#include "temporary_folder.h"

namespace tessera::checkpoint {
namespace {

using testing::error_of;
using ::testing::HasSubstr;

Holding sharded(const std::string& name, std::vector<int64_t> sizes, std::vector<Box> boxes) {
  return {name, {}, at::kFloat, std::move(sizes), "(Shard(0)) on [2]", false, std::move(boxes)};
}

Holding plain(const std::string& name, const std::vector<int64_t>& sizes) {
  return {name, {}, at::kFloat, sizes, "plain", true, {whole(sizes)}};
}

RankState tensors(std::vector<Holding> holdings) { return {std::move(holdings), {}}; }

TEST(SavePlan, EachShardGoesToItsRank) {
  const auto plan = plan_save({tensors({sharded("w", {5}, {{{0}, {3}}})}), tensors({sharded("w", {5}, {{{3}, {2}}})})});
  ASSERT_EQ(plan.tensors.size(), 1);
  ASSERT_EQ(plan.tensors[0].parts.size(), 2);
  EXPECT_EQ(plan.tensors[0].parts[0].rank, 0);
  EXPECT_EQ(plan.tensors[0].parts[1].rank, 1);
  EXPECT_EQ(plan.tensors[0].parts[1].box, (Box{{3}, {2}}));
}

TEST(SavePlan, ReplicatedPartsAreWrittenOnceAndBalanced) {
  std::vector<Holding> all;
  for (int i = 0; i < 10; ++i) all.push_back(sharded("w" + std::to_string(i), {100 + i}, {whole({100 + i})}));
  const auto plan = plan_save({tensors(all), tensors(all), tensors(all)});
  std::vector<int64_t> load(3, 0);
  for (const auto& tensor : plan.tensors) {
    ASSERT_EQ(tensor.parts.size(), 1) << tensor.what.name;
    load[tensor.parts[0].rank] += tensor.parts[0].box.numel();
  }
  EXPECT_EQ(load[0] + load[1] + load[2], 1045);
  EXPECT_LE(*std::max_element(load.begin(), load.end()), 430); // 10 tensors of about 100 over 3 ranks: 4, 3, 3
}

TEST(SavePlan, ReplicatedPartsFillUpWhatShardsLeave) {
  const auto big = sharded("big", {1000}, {whole({1000})}), copy = sharded("copy", {10}, {whole({10})});
  const auto plan = plan_save({tensors({big, copy}), tensors({copy})});
  EXPECT_EQ(plan.tensors[1].parts[0].rank, 1);
}

TEST(SavePlan, PlainTensorsAreTheLowestRanks) {
  const auto plan = plan_save({tensors({}), tensors({plain("b", {4})}), tensors({plain("b", {4})})});
  ASSERT_EQ(plan.tensors[0].parts.size(), 1);
  EXPECT_EQ(plan.tensors[0].parts[0].rank, 1);
}

TEST(SavePlan, EmptyTensorsAreWrittenByTheLowestRank) {
  const auto plan = plan_save({tensors({}), tensors({sharded("e", {0, 3}, {})}), tensors({sharded("e", {0, 3}, {})})});
  ASSERT_EQ(plan.tensors[0].parts.size(), 1);
  EXPECT_EQ(plan.tensors[0].parts[0].rank, 1);
  EXPECT_EQ(plan.tensors[0].parts[0].box, whole({0, 3}));
}

TEST(SavePlan, ValuesAreMerged) {
  RankState first, second;
  first.values = {{"step", int64_t{3}}, {"nan", std::nan("")}};
  second.values = {{"step", int64_t{3}}, {"nan", std::nan("")}, {"rng.1", std::string("x")}};
  const auto plan = plan_save({first, second});
  ASSERT_EQ(plan.values.size(), 3);
  EXPECT_EQ(plan.values[2].first, "rng.1");
}

TEST(SavePlan, ErrorsNameTheTensorAndTheRanks) {
  const auto error = [](const std::vector<RankState>& ranks) { return error_of([&] { plan_save(ranks); }); };
  EXPECT_THAT(error({tensors({plain("b", {4})}), tensors({plain("b", {5})})}),
              HasSubstr("tensor \"b\" is Float[4] on rank 0 and Float[5] on rank 1"));
  EXPECT_THAT(error({tensors({sharded("w", {5}, {{{0}, {3}}})}), tensors({sharded("w", {5}, {})})}),
              HasSubstr("\"w\": the ranks hold 3 of its 5 elements"));
  EXPECT_THAT(error({tensors({sharded("w", {5}, {{{0}, {3}}})}), tensors({sharded("w", {5}, {{{2}, {3}}})})}),
              HasSubstr("\"w\": rank 0 holds [0:3] and rank 1 holds [2:5], which overlap"));
  EXPECT_THAT(error({tensors({sharded("w", {5}, {{{0}, {6}}})})}), HasSubstr("rank 0 holds [0:6] of a tensor of shape [5]"));
  RankState three, four;
  three.values = {{"step", int64_t{3}}};
  four.values = {{"step", int64_t{4}}};
  EXPECT_THAT(error({three, four}), HasSubstr("value \"step\" is {\"i64\":3} on rank 0 and {\"i64\":4} on rank 1"));
  EXPECT_THAT(error({three, tensors({plain("step", {1})})}),
              HasSubstr("\"step\" is a tensor on one rank and a value on another"));
}

TEST(RankStateJson, ComesBack) {
  auto state = tensors({plain("b", {4, 2}), sharded("w", {5}, {{{0}, {3}}, {{4}, {1}}}), plain("s", {})});
  state.tensors[0].aliases = {"c", "d"};
  state.values = {{"a", true},
                  {"b2", 0.1},
                  {"c2", std::vector<double>{1, std::numeric_limits<double>::infinity()}},
                  {"d2", std::vector<std::string>{"x"}}};
  const auto json = to_json(state);
  const auto back = rank_state_from_json(JsonView(json, "message"));
  EXPECT_EQ(to_json(back), json);
  EXPECT_EQ(back.tensors[0].aliases, state.tensors[0].aliases);
  EXPECT_EQ(back.tensors[1].boxes, state.tensors[1].boxes);
  EXPECT_EQ(back.values, state.values);
}

} // namespace
} // namespace tessera::checkpoint
