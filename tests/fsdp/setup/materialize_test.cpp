// Parameters that a module from the meta device gets its values in.
#include <tessera/dtensor/distribute_module.h>
#include <tessera/fsdp/meta_init.h>

#include <gmock/gmock.h>

#include <functional>
#include <memory>
#include <vector>

#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::materialize_test {
namespace {

using torch::nn::Linear;
using torch::nn::Module;

const std::function<void(Module&)> kNothing = [](Module&) {};

TEST(Materialize, WhatAnInitThatThrewDidNotWriteIsTheNextCalls) {
  auto net = on_meta([] { return torch::nn::Sequential(Linear(3, 2), torch::nn::BatchNorm1d(2)); });
  replicate(*net, world_mesh()); // so that each rank has elements of all
  const auto init = [](Module& module) {
    if (auto* linear = module.as<Linear>()) linear->weight.fill_(1);
    if (auto* norm = module.as<torch::nn::BatchNorm1d>()) {
      norm->running_mean.zero_();
      TORCH_CHECK(false, "thrown in init");
    }
  };
  EXPECT_THROWS_WITH(materialize(*net, init), "thrown in init");
  {
    const torch::NoGradGuard no_grad;
    net[0]->as<Linear>()->bias.fill_(0); // meanwhile
  }
  EXPECT_THAT(materialize(*net, kNothing),
              ::testing::UnorderedElementsAre("1.weight", "1.bias", "1.running_var", "1.num_batches_tracked"));
  EXPECT_THAT(materialize(*net, kNothing), ::testing::IsEmpty());
}

/// Scales what its layer does to itself.
struct ScaledImpl : Module {
  ScaledImpl() : proj(register_module("proj", Linear(4, 4))) {}
  Linear proj;
};

TEST(Materialize, InitializesEachModuleOnceAfterThoseBelowIt) {
  auto net = on_meta([] {
    torch::nn::ModuleList list;
    const auto shared = std::make_shared<ScaledImpl>();
    list->push_back(shared);
    list->push_back(shared);
    return list;
  });
  fully_shard(net, world_mesh());
  std::vector<std::string> order;
  materialize(*net, [&](Module& module) {
    order.push_back(module.name());
    if (auto* linear = module.as<Linear>()) {
      for (auto& parameter : linear->parameters()) parameter.fill_(1);
    }
    if (auto* scaled = module.as<ScaledImpl>()) scaled->proj->weight.mul_(3);
  });
  const auto& block = *net[0]->as<ScaledImpl>();
  EXPECT_TENSORS_EQUAL(full(block.proj->weight), torch::full({4, 4}, 3.0));
  EXPECT_THAT(order, ::testing::ElementsAre(block.proj->name(), block.name(), net->name()));
}

TEST(Materialize, SeesWritesThroughViews) {
  for (const bool replicates : {true, false}) {
    auto linear = on_meta([] { return Linear(4, 6); });
    replicates ? replicate(*linear, world_mesh()) : fully_shard(*linear, world_mesh());
    const auto init = [](Module& module) {
      for (auto& parameter : module.parameters()) {
        parameter.slice(0, 0, 3).fill_(1);
        parameter.slice(0, 3, 6).fill_(2);
      }
    };
    EXPECT_THAT(materialize(*linear, init), ::testing::IsEmpty());
    EXPECT_TENSORS_EQUAL(full(linear->weight).sum(), torch::tensor(36.0F));
  }
}

/// Running statistics that tensor parallelism has replicated are in no group.
TEST(Materialize, GivesBuffersThatAreDTensorsMemory) {
  const auto make = [] { return on_meta([] { return torch::nn::Sequential(Linear(3, 2), torch::nn::BatchNorm1d(2)); }); };
  const auto mesh = init_device_mesh(test_device_type(), {1, world_size()}, {"dp", "tp"});
  const auto init = [](Module& module) {
    for (auto& parameter : module.parameters(/*recurse=*/false)) parameter.fill_(2);
    for (auto& buffer : module.buffers(/*recurse=*/false)) buffer.fill_(3);
  };
  auto net = make();
  distribute_module(*net, mesh["tp"]);
  EXPECT_THROWS_WITH(materialize(*net, init), "the parameter 0.weight is a DTensor already and not sharded: call fully_shard");
  fully_shard(*net, mesh["dp"]);
  EXPECT_THAT(materialize(*net, kNothing),
              ::testing::UnorderedElementsAre("0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var",
                                              "1.num_batches_tracked"));
  for (auto& buffer : net->buffers()) EXPECT_TRUE(is_dtensor(buffer) && !buffer.is_meta());
  auto other = make();
  distribute_module(*other, mesh["tp"]);
  fully_shard(*other, mesh["dp"]);
  EXPECT_THAT(materialize(*other, init), ::testing::IsEmpty());
  EXPECT_TENSORS_EQUAL(DTensor(other->buffers()[0]).full_tensor(), torch::full({2}, 3.0F));
}

} // namespace
} // namespace tessera::testing::materialize_test
