#include <gmock/gmock.h>
#include <tessera/checkpoint/save/plan.h>
#include <torch/torch.h>

#include <tessera/tests/support/matchers.h>

namespace tessera::checkpoint::plan_test {
namespace {

using testing::error_of;
using ::testing::HasSubstr;

internal::Holding sharded(const std::string& name, std::vector<int64_t> sizes, std::vector<internal::Box> boxes) {
  return {name, {}, at::kFloat, std::move(sizes), "(Shard(0)) on [2]", "DeviceMesh(cpu, [0, 1])", std::move(boxes)};
}

internal::Holding plain(const std::string& name, const std::vector<int64_t>& sizes) {
  return {name, {}, at::kFloat, sizes, "plain", "", {internal::whole(sizes)}};
}

using Holdings = std::vector<internal::Holding>;

TEST(SavePlan, EachShardGoesToItsRank) {
  const Holdings first{sharded("w", {5}, {{{0}, {3}}})}, second{sharded("w", {5}, {{{3}, {2}}})};
  const auto plan = internal::plan_tensors({first, second});
  ASSERT_EQ(plan.size(), 1);
  ASSERT_EQ(plan[0].parts.size(), 2);
  EXPECT_EQ(plan[0].parts[0].rank, 0);
  EXPECT_EQ(plan[0].parts[1].rank, 1);
  EXPECT_EQ(plan[0].parts[1].box, (internal::Box{{3}, {2}}));
}

TEST(SavePlan, ReplicatedPartsAreWrittenOnceAndBalanced) {
  Holdings all;
  for (int i = 0; i < 10; ++i) all.push_back(sharded("w" + std::to_string(i), {100 + i}, {internal::whole({100 + i})}));
  const auto plan = internal::plan_tensors({all, all, all});
  std::vector<int64_t> load(3, 0);
  for (const auto& tensor : plan) {
    ASSERT_EQ(tensor.parts.size(), 1) << tensor.what.name;
    load[tensor.parts[0].rank] += tensor.parts[0].box.numel();
  }
  EXPECT_EQ(load[0] + load[1] + load[2], 1045);
  EXPECT_LE(*std::max_element(load.begin(), load.end()), 430); // 10 tensors of about 100 over 3 ranks: 4, 3, 3
}

TEST(SavePlan, ReplicatedPartsFillUpWhatShardsLeave) {
  const auto big = sharded("big", {1000}, {internal::whole({1000})}), copy = sharded("copy", {10}, {internal::whole({10})});
  const Holdings both{big, copy}, one{copy};
  EXPECT_EQ(internal::plan_tensors({both, one})[1].parts[0].rank, 1);
}

TEST(SavePlan, PlainTensorsAreTheLowestRanks) {
  const Holdings none, some{plain("b", {4})};
  const auto plan = internal::plan_tensors({none, some, some});
  ASSERT_EQ(plan[0].parts.size(), 1);
  EXPECT_EQ(plan[0].parts[0].rank, 1);
}

TEST(SavePlan, EmptyTensorsAreWrittenByTheLowestRank) {
  const Holdings none, some{sharded("e", {0, 3}, {})};
  const auto plan = internal::plan_tensors({none, some, some});
  ASSERT_EQ(plan[0].parts.size(), 1);
  EXPECT_EQ(plan[0].parts[0].rank, 1);
  EXPECT_EQ(plan[0].parts[0].box, internal::whole({0, 3}));
}

TEST(SavePlan, ValuesAreMerged) {
  const internal::StateValues first{{"step", int64_t{3}}, {"nan", std::nan("")}};
  const internal::StateValues second{{"step", int64_t{3}}, {"nan", std::nan("")}, {"rng.1", std::string("x")}};
  const auto values = internal::merge_values({first, second});
  ASSERT_EQ(values.size(), 3);
  EXPECT_EQ(values[2].first, "rng.1");
}

TEST(SavePlan, ErrorsNameTheTensorAndTheRanks) {
  const auto error = [](const std::vector<Holdings>& ranks) { return error_of([&] { internal::plan_tensors(ranks); }); };
  const Holdings four{plain("b", {4})}, five{plain("b", {5})};
  EXPECT_THAT(error({four, five}), HasSubstr("tensor \"b\" is Float[4] on rank 0 and Float[5] on rank 1; what follows each "
                                             "rank's part must be a DTensor"));
  const Holdings low{sharded("w", {5}, {{{0}, {3}}})}, high{sharded("w", {5}, {{{2}, {3}}})}, none{sharded("w", {5}, {})};
  EXPECT_THAT(error({low, none}), HasSubstr("\"w\": the ranks hold 3 of its 5 elements"));
  EXPECT_THAT(error({low, high}), HasSubstr("\"w\": rank 0 holds [0:3] and rank 1 holds [2:5], which overlap"));
  const Holdings outside{sharded("w", {5}, {{{0}, {6}}})};
  EXPECT_THAT(error({outside}), HasSubstr("rank 0 holds [0:6] of a tensor of shape [5]"));
  const internal::StateValues three{{"step", int64_t{3}}}, more{{"step", int64_t{4}}};
  EXPECT_THAT(error_of([&] {
                internal::merge_values({three, more});
              }),
              HasSubstr("value \"step\" is {\"i64\":3} on rank 0 and {\"i64\":4} on rank 1"));
}

TEST(Planner, KeepsThePlanWhileNothingChanges) {
  const internal::Ranks ranks;
  internal::Planner planner;
  internal::RankState state{{plain("b", {4})}, {{"step", int64_t{1}}}};
  const auto* parts = planner.plan(ranks, state).tensors[0].parts.data();
  state.values[0].second = int64_t{2};
  const auto& again = planner.plan(ranks, state);
  EXPECT_EQ(again.tensors[0].parts.data(), parts);
  EXPECT_EQ(again.values[0].second, StateValue(int64_t{2}));
  state.tensors.push_back(plain("c", {4}));
  EXPECT_EQ(planner.plan(ranks, state).tensors.size(), 2);
}

TEST(Planner, ANameThatIsATensorAndAValueIsAnError) {
  internal::Planner planner;
  const internal::RankState state{{plain("step", {1})}, {{"step", int64_t{3}}}};
  EXPECT_THAT(error_of([&] { planner.plan(internal::Ranks(), state); }),
              HasSubstr("\"step\" is a tensor on one rank and a value on another"));
  auto tied = plain("a", {1});
  tied.aliases = {"b"};
  EXPECT_THAT(error_of([&] {
                planner.plan(internal::Ranks(), {{tied, plain("b", {1})}, {}});
              }),
              HasSubstr("\"b\" is a tensor on one rank and a tied name on another"));
}

TEST(Holdings, ComeBackFromJson) {
  Holdings tensors{plain("b", {4, 2}), sharded("w", {5}, {{{0}, {3}}, {{4}, {1}}}), plain("s", {})};
  tensors[0].aliases = {"c", "d"};
  const auto json = to_json(tensors);
  const auto back = internal::holdings_from_json(internal::JsonView(json, "message"));
  EXPECT_EQ(to_json(back), json);
  EXPECT_EQ(back[0].aliases, tensors[0].aliases);
  EXPECT_EQ(back[1].boxes, tensors[1].boxes);
}

} // namespace
} // namespace tessera::checkpoint::plan_test
