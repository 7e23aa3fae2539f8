// What fully_shard makes of modules that share parameters, memory or a group, and what it leaves when it fails.
#include <tessera/tessera.h>

#include <gmock/gmock.h>

#include <memory>
#include <vector>

#include <tessera/fsdp/model/sharded_module.h>

#include <tessera/tests/fsdp/gradient_settings.h>
#include <tessera/tests/fsdp/limited_memory.h>
#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::structure_test {
namespace {

using torch::nn::Linear;

TEST(FullyShard, WithoutMemoryForItsShardAModuleStaysPlain) {
  if (!tests_the_cpu()) GTEST_SKIP() << "the CPU's memory is limited here";
  torch::manual_seed(0);
  Linear linear(256, 256);
  const FullyShardOptions options{.initial_weights = InitialWeights::kUnchecked};
  {
    const LimitedMemory limited(linear->weight.nbytes() / 4);
    EXPECT_THROWS_WITH(fully_shard(linear, world_mesh(), options), "tried to allocate");
  }
  EXPECT_FALSE(is_dtensor(linear->weight));
  linear(torch::ones({2, 256})).sum().backward();
  EXPECT_TRUE(linear->weight.grad().defined());
  linear->zero_grad();
  fully_shard(linear, world_mesh(), options);
  EXPECT_NO_THROW(linear(torch::ones({2, 256}, test_device())).sum().backward());
}

/// The first bucket has its memory by then.
TEST(FullyShard, AfterAFailureAmidItsChangesEachReadSaysSo) {
  if (!tests_the_cpu() || world_size() == 1) GTEST_SKIP() << "needs 2 ranks, and limits the CPU's memory";
  torch::manual_seed(0);
  torch::nn::Sequential net(Linear(4, 64), Linear(64, 64));
  {
    const LimitedMemory limited(size_t{4} * 64 * 64);
    EXPECT_THROWS_WITH(replicate(*net, world_mesh(), {.initial_weights = InitialWeights::kUnchecked, .bucket_bytes = 2000}),
                       "tried to allocate");
  }
  EXPECT_THROWS_WITH(net->forward(torch::ones({2, 4}, test_device())),
                     "the model cannot be used any more, because fully_shard failed amid its changes: ");
}

TEST(ReshardParameters, AFailedGatherLeavesParametersAndBuffersInOneDtype) {
  if (!tests_the_cpu()) GTEST_SKIP() << "the CPU's memory is limited here";
  torch::manual_seed(0);
  torch::nn::Sequential net(Linear(128, 128), torch::nn::BatchNorm1d(128));
  fully_shard(*net, world_mesh());
  {
    const LimitedMemory limited(size_t{8} * 128 * 128);
    EXPECT_THROWS_WITH(reshard_parameters(*net, {.dtype = torch::kDouble}), "tried to allocate");
  }
  EXPECT_EQ(net->named_buffers()["1.running_mean"].scalar_type(), torch::kFloat);
  EXPECT_NO_THROW(net->forward(torch::ones({2, 128}, test_device())).sum().backward());
  net->zero_grad();
  reshard_parameters(*net, {.dtype = torch::kDouble});
  EXPECT_EQ(net->named_buffers()["1.running_mean"].scalar_type(), torch::kDouble);
  EXPECT_EQ(net->parameters()[0].scalar_type(), torch::kDouble);
}

std::shared_ptr<torch::nn::Module> module_of(const torch::Tensor& first, const torch::Tensor& second) {
  auto module = std::make_shared<torch::nn::Module>();
  module->register_parameter("first", first.detach());
  module->register_parameter("second", second.detach());
  return module;
}

TEST(FullyShard, ASliceOfAParameterIsNoOtherParameter) {
  const auto table = torch::ones({8, 6});
  const std::vector<torch::Tensor> slices{table.slice(1, 0, 3), table.slice(1, 1, 6, 2), table.t().slice(0, 2, 4),
                                          table.slice(0, 3, 5).slice(1, 5, 6)};
  for (const auto& slice : slices) {
    EXPECT_THROWS_WITH(fully_shard(*module_of(table, slice), world_mesh()),
                       "the parameter second shares memory with the parameter first");
    EXPECT_THROWS_WITH(fully_shard(*module_of(slice, table), world_mesh()),
                       "the parameter second shares memory with the parameter first");
  }
  EXPECT_THROWS_WITH(fully_shard(*module_of(table.slice(1, 0, 4), table.slice(1, 3, 6)), world_mesh()), "shares memory");
}

TEST(FullyShard, SlicesWithoutACommonElementAreParametersOfTheirOwn) {
  const auto table = torch::ones({8, 6});
  EXPECT_NO_THROW(fully_shard(*module_of(table.slice(1, 0, 3), table.slice(1, 3, 6)), world_mesh()));
  EXPECT_NO_THROW(fully_shard(*module_of(table.slice(1, 0, 6, 2), table.slice(1, 1, 6, 2)), world_mesh()));
  EXPECT_NO_THROW(fully_shard(*module_of(table.slice(1, 4, 6), table.slice(0, 1, 5).slice(1, 0, 4)), world_mesh()));
}

/// Perhaps one of several on one inner layer.
struct LayerImpl : torch::nn::Module {
  explicit LayerImpl(const Linear& shared) : core(register_module("core", shared)) {}
  torch::Tensor forward(const torch::Tensor& x) { return core(x); }
  Linear core;
};

TEST(FullyShard, AModuleWhoseParametersAnotherOneHasKeepsItsOptions) {
  torch::manual_seed(0);
  const Linear core(4, 4);
  const auto first = std::make_shared<LayerImpl>(core), second = std::make_shared<LayerImpl>(core);
  fully_shard(*first, world_mesh());
  fully_shard(*second, world_mesh(), {.mixed_precision = {.output_dtype = torch::kDouble}});
  EXPECT_TRUE(is_sharded(*second));
  EXPECT_THAT(fsdp(*second).parameter_names(), ::testing::IsEmpty());
  EXPECT_THROWS_WITH(fully_shard(*second, world_mesh()), "is sharded already");
  EXPECT_THROWS_WITH(static_cast<void>(no_sync(*second)), "were sharded with those of");
  torch::nn::ModuleList both;
  both->push_back(first);
  both->push_back(second);
  fully_shard(both, world_mesh());
  EXPECT_EQ(fsdp(*second).state()->schedule(), fsdp(*both).state()->schedule());
  const auto x = torch::ones({2, 4}, test_device());
  EXPECT_EQ(tessera::call(first, x).scalar_type(), torch::kFloat);
  const auto result = tessera::call(second, x);
  EXPECT_EQ(result.scalar_type(), torch::kDouble);
  result.sum().backward();
  EXPECT_TENSORS_CLOSE(full(core->weight.grad()), torch::full({4, 4}, 2.0));
}

/// A head on an encoder, which another model may have too.
struct TaskImpl : torch::nn::Module {
  explicit TaskImpl(const Linear& shared)
      : encoder(register_module("encoder", shared)), head(register_module("head", Linear(4, 2))) {}
  torch::Tensor forward(const torch::Tensor& x) { return head(encoder(x)); }
  Linear encoder, head;
};

struct TwoTasks {
  TwoTasks() {
    torch::manual_seed(0);
    const Linear encoder(4, 4);
    first = std::make_shared<TaskImpl>(encoder);
    second = std::make_shared<TaskImpl>(encoder);
  }
  std::shared_ptr<TaskImpl> first, second;
};

TEST(FullyShard, ModelsThatShareAModuleLabelTheirCollectivesApart) {
  if (world_size() == 1) GTEST_SKIP() << "one rank communicates with nobody";
  const TwoTasks tasks;
  fully_shard(*tasks.first, world_mesh());
  fully_shard(*tasks.second, world_mesh());
  EXPECT_NE(fsdp(*tasks.first).state()->label(), fsdp(*tasks.second).state()->label());
}

TEST(FullyShard, SettingsReachAModuleThatAnotherModelHasToo) {
  const TwoTasks tasks;
  fully_shard(*tasks.first->encoder, world_mesh());
  fully_shard(*tasks.first, world_mesh());
  fully_shard(*tasks.second, world_mesh());
  const auto encoder = [&] { return settings_of(fsdp(*tasks.first->encoder)); };
  auto handle = fsdp(*tasks.second);
  handle.set_requires_gradient_sync(false, /*recurse=*/false);
  EXPECT_TRUE(encoder().sync());
  handle.set_requires_gradient_sync(false);
  EXPECT_FALSE(encoder().sync());
  handle.set_requires_gradient_sync(true);
  handle.set_requires_all_reduce(false);
  EXPECT_TRUE(encoder().sync());
  EXPECT_FALSE(encoder().all_reduce());
  EXPECT_TRUE(settings_of(fsdp(*tasks.first)).all_reduce());
}

TEST(NoSync, ReachesAModuleThatAnotherModelHasTooOrIsAnError) {
  const TwoTasks apart, inside;
  fully_shard(*apart.first->encoder, world_mesh());
  for (const auto* tasks : {&apart, &inside}) {
    fully_shard(*tasks->first, world_mesh());
    fully_shard(*tasks->second, world_mesh());
  }
  const auto encoder = [&] { return settings_of(fsdp(*apart.first->encoder)); };
  {
    const auto scope = no_sync(*apart.second);
    EXPECT_FALSE(encoder().sync());
  }
  EXPECT_TRUE(encoder().sync());
  EXPECT_THROWS_WITH(static_cast<void>(no_sync(*inside.second)), "no_sync: the parameter encoder.weight of the model ");
  EXPECT_TRUE(settings_of(fsdp(*inside.second)).sync());
}

/// As FSDP2 does.
TEST(Call, FreesTheGroupOfSeveralModulesAfterTheLastOfThem) {
  torch::manual_seed(0);
  Linear a(4, 4), b(4, 4);
  const auto handle = fully_shard({a.ptr(), b.ptr()}, world_mesh(), {.reshard_after_forward = true});
  const torch::NoGradGuard no_grad;
  const auto x = torch::ones({2, 4}, test_device());
  process_context().reset_counters();
  for (auto order : {std::vector<Linear>{a, b}, {b, a}}) {
    tessera::call(order[0], x);
    EXPECT_EQ(handle.unsharded_bytes() > 0, world_size() > 1);
    tessera::call(order[1], x);
    EXPECT_EQ(handle.unsharded_bytes(), 0);
  }
  EXPECT_EQ(process_context().count(CollectiveKind::kAllGather).calls, world_size() > 1 ? 2 : 0);
}

} // namespace
} // namespace tessera::testing::structure_test
