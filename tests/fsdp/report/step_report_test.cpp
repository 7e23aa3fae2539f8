// What a step says of itself, against the counters of the communicators.
#include <gmock/gmock.h>
#include <nlohmann/json.hpp>

#include <tessera/collectives/process_context.h>

#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::step_report_test {
namespace {

using ::testing::HasSubstr;

Traffic counted(CollectiveKind kind) { return process_context().count(kind); }

void step(Net& net, torch::optim::Optimizer& optimizer, int64_t number) {
  optimizer.zero_grad();
  loss_of(net, own_batch(number)).backward();
  optimizer.step();
}

TEST(StepReport, CountsWhatTheCommunicatorsCount) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Net net = make_net();
    shard_model(net, strategy);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    auto handle = fsdp(*net);
    handle.set_reporting(true);
    for (int64_t number = 0; number < 3; ++number) {
      process_context().reset_counters();
      step(net, optimizer, number);
      const auto report = handle.report();
      EXPECT_EQ(report.all_gathers(), counted(CollectiveKind::kAllGather));
      EXPECT_EQ(report.reduce_scatters(), counted(CollectiveKind::kReduceScatter));
      EXPECT_EQ(report.all_reduces(), counted(CollectiveKind::kAllReduce));
      EXPECT_EQ(report.rank, world_rank());
      EXPECT_GT(report.seconds, report.exposed_seconds());
    }
    EXPECT_EQ(handle.report().groups.size(), 0) << "nothing happened since the last one";
  }
}

TEST(StepReport, CountsReductionsInBFloat16AndByAFactor) {
  FullyShardOptions options;
  options.mixed_precision.param_dtype = torch::kBFloat16;
  options.mixed_precision.reduce_dtype = torch::kBFloat16;
  Net net = make_net();
  shard_model(net, {"full in bfloat16", world_mesh, options});
  fsdp(*net).set_gradient_divide_factor(3);
  fsdp(*net).set_reporting(true);
  process_context().reset_counters();
  loss_of(net, global_batch(0)).backward();
  const auto report = fsdp(*net).report();
  EXPECT_EQ(report.all_gathers(), counted(CollectiveKind::kAllGather));
  EXPECT_EQ(report.reduce_scatters(), counted(CollectiveKind::kReduceScatter));
}

TEST(StepReport, SaysWhatWasGatheredAhead) {
  if (world_size() == 1) GTEST_SKIP() << "one rank gathers nothing";
  Net net = make_net();
  shard_model(net, strategies()[0]);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  step(net, optimizer, 0); // which records the order of the groups
  auto handle = fsdp(*net);
  const auto hits_and_misses = [&](int64_t depth) {
    handle.set_prefetch_depth(depth);
    handle.set_reporting(true);
    step(net, optimizer, 1);
    std::vector<std::pair<int64_t, int64_t>> all;
    for (const auto& group : handle.report().groups) all.emplace_back(group.prefetch_hits, group.prefetch_misses);
    return all;
  };
  using Expected = std::vector<std::pair<int64_t, int64_t>>; // the root, then three blocks, of which the last stays gathered
  EXPECT_EQ(hits_and_misses(1), (Expected{{0, 1}, {2, 0}, {2, 0}, {1, 0}}));
  EXPECT_EQ(hits_and_misses(0), (Expected{{0, 1}, {0, 2}, {0, 2}, {0, 1}}));
}

TEST(StepReport, KnowsTheMostThatIsUnshardedAtOnce) {
  if (world_size() == 1) GTEST_SKIP() << "one rank gathers nothing";
  Net net = make_net();
  shard_model(net, strategies()[0]);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  step(net, optimizer, 0);
  fsdp(*net).set_reporting(true);
  step(net, optimizer, 1);
  const auto report = fsdp(*net).report();
  ASSERT_EQ(report.groups.size(), 4);
  EXPECT_EQ(report.peak_unsharded_bytes, report.groups[0].unsharded_bytes + 2 * report.groups[1].unsharded_bytes);
}

TEST(StepReport, KnowsWhatStaysGathered) {
  if (world_size() == 1) GTEST_SKIP() << "one rank gathers nothing";
  Net net = make_net();
  shard_model(net, {"kept after forward", world_mesh, {.reshard_after_forward = false}});
  const torch::NoGradGuard no_grad;
  net->forward(global_batch(0));
  auto handle = fsdp(*net);
  handle.set_reporting(true);
  int64_t all = handle.unsharded_bytes();
  for (const auto& block : *net->blocks) all += fsdp(*block).unsharded_bytes();
  EXPECT_GT(all, 0);
  for (int step = 0; step < 3; ++step) {
    net->forward(global_batch(0));
    EXPECT_EQ(handle.report().peak_unsharded_bytes, all);
  }
}

TEST(StepReport, IsTheSameInEachStep) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Net net = make_net();
    shard_model(net, strategy);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    for (int64_t number = 0; number < 2; ++number) step(net, optimizer, number);
    fsdp(*net).set_reporting(true);
    std::vector<int64_t> peaks;
    for (int64_t number = 2; number < 6; ++number) {
      step(net, optimizer, number);
      peaks.push_back(fsdp(*net).report().peak_unsharded_bytes);
    }
    EXPECT_THAT(peaks, ::testing::Each(peaks[0]));
  }
}

TEST(StepReport, IsTextAndJson) {
  Net net = make_net();
  shard_model(net, strategies()[0]);
  auto handle = fsdp(*net);
  handle.set_reporting(true);
  loss_of(net, global_batch(0)).backward();
  const auto report = handle.report();
  const auto text = report.to_string();
  EXPECT_THAT(text, HasSubstr("all-gathers"));
  EXPECT_THAT(text, HasSubstr(c10::str("rank ", world_rank(), ": ")));
  const auto json = nlohmann::json::parse(report.to_json());
  EXPECT_EQ(json["format"], "tessera step report");
  EXPECT_EQ(json["version"], 1);
  int64_t bytes = 0;
  for (const auto& group : json["groups"]) {
    EXPECT_THAT(text, HasSubstr(group["name"].get<std::string>()));
    bytes += group["all_gathers"]["bytes"].get<int64_t>();
  }
  EXPECT_EQ(bytes, report.all_gathers().bytes);
}

/// There the device waits, and the host goes on at once.
TEST(StepReport, SaysNothingOfWaitsOnStreams) {
  const StepReport made{.groups = {{.name = "a", .gather_wait_seconds = 1},
                                   {.name = "b", .gather_wait_seconds = 2, .reduce_wait_seconds = 3, .waits_on_streams = true}}};
  EXPECT_EQ(made.exposed_seconds(), 1);
  const auto groups = nlohmann::json::parse(made.to_json())["groups"];
  EXPECT_EQ(groups[0]["gather_wait_seconds"], 1);
  EXPECT_TRUE(groups[1]["gather_wait_seconds"].is_null() && groups[1]["reduce_wait_seconds"].is_null());
  EXPECT_THAT(made.to_string(), HasSubstr("of which - ms waiting"));
  Net net = make_net();
  shard_model(net, strategies()[0]);
  fsdp(*net).set_reporting(true);
  loss_of(net, global_batch(0)).backward();
  for (const auto& group : fsdp(*net).report().groups) EXPECT_EQ(group.waits_on_streams, !tests_the_cpu());
}

TEST(StepReport, IsAnErrorUnlessAskedFor) {
  Net net = make_net();
  shard_model(net, strategies()[0]);
  auto handle = fsdp(*net->blocks[0]);
  EXPECT_THROWS_WITH(handle.report(),
                     c10::str("report: nothing was recorded on rank ", world_rank(), ": call set_reporting(true)"));
  handle.set_reporting(true);
  loss_of(net, global_batch(0)).backward();
  EXPECT_EQ(handle.report().groups.size(), world_size() > 1 ? 4 : 0) << "of the whole model";
  handle.set_reporting(false);
  EXPECT_THROWS_WITH(handle.report(), "set_reporting(true)");
}

} // namespace
} // namespace tessera::testing::step_report_test
