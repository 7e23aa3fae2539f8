// Parameters that fully_shard is told to leave as they are, and calls without a mesh.
#include <gmock/gmock.h>

#include <tessera/checkpoint/state_dict.h>
#include <tessera/fsdp/clip_grad.h>
#include <tessera/fsdp/reshard_parameters.h>
#include <tessera/fsdp/summary.h>

#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::ignored_params_test {
namespace {

/// A model of two blocks, each with an adapter that ranks train apart.
struct AdaptedImpl : torch::nn::Module {
  AdaptedImpl() {
    torch::manual_seed(0);
    for (const std::string name : {"first", "second"}) {
      auto block = std::make_shared<torch::nn::Module>(name);
      block->register_module("base", torch::nn::Linear(5, 5));
      block->register_parameter("adapter", torch::rand({5, 5}));
      blocks.push_back(register_module(name, block));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (const auto& block : blocks) {
      const auto base = std::dynamic_pointer_cast<torch::nn::LinearImpl>(block->children()[0]);
      x = torch::tanh(base->forward(x) + x.matmul(block->parameters(/*recurse=*/false)[0]));
    }
    return x;
  }
  std::vector<torch::Tensor> adapters() const {
    return {blocks[0]->parameters(/*recurse=*/false)[0], blocks[1]->parameters(/*recurse=*/false)[0]};
  }
  std::vector<std::shared_ptr<torch::nn::Module>> blocks;
};
TORCH_MODULE(Adapted);

torch::Tensor rows_of(int64_t rank, c10::Device device = test_device()) {
  return (torch::arange(10.0F).view({2, 5}) / 10 + static_cast<float>(rank)).to(device);
}

void shard(Adapted& model, const Strategy& strategy) {
  model->to(test_device()); // fully_shard leaves ignored parameters where they are
  auto options = strategy.options;
  options.ignored_params = model->adapters();
  const auto wrap = [&](torch::nn::Module& module) {
    return strategy.replicates ? replicate(module, strategy.mesh(), options) : fully_shard(module, strategy.mesh(), options);
  };
  for (const auto& block : model->blocks) wrap(*block);
  wrap(*model);
}

/// A step of the unsharded twin: the mean gradient over the ranks, but this rank's own of the adapters.
void step_twin(Adapted& twin) {
  twin->zero_grad();
  twin->forward(rows_of(world_rank(), twin_device())).sum().backward();
  const auto adapters = twin->adapters();
  for (auto& parameter : twin->parameters()) {
    const bool is_adapter = parameter.is_same(adapters[0]) || parameter.is_same(adapters[1]);
    if (is_adapter) continue;
    auto mean = parameter.grad().to(test_device());
    world_mesh().communicator()->all_reduce(mean, ReduceOp::kAvg, "gradient").wait();
    parameter.mutable_grad().copy_(mean);
  }
}

TEST(IgnoredParams, TrainByThemselvesBesideShardsWithoutAWarning) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Adapted model, twin;
    twin->to(twin_device());
    shard(model, strategy);
    torch::optim::SGD ours(model->parameters(), 0.1), theirs(twin->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      step_twin(twin);
      ours.zero_grad();
      model->forward(rows_of(world_rank())).sum().backward();
      for (size_t i = 0; i < 2; ++i) {
        EXPECT_FALSE(is_dtensor(model->adapters()[i]));
        EXPECT_TENSORS_CLOSE(model->adapters()[i].grad(), twin->adapters()[i].grad());
      }
      ours.step();
      theirs.step();
    }
    EXPECT_LE(parameter_difference(*model, *twin), 1e-6);
  }
}

TEST(IgnoredParams, AreKnownToSummariesClippingAndStateDicts) {
  Adapted model;
  shard(model, strategies()[0]);
  model->forward(rows_of(world_rank())).sum().backward();
  EXPECT_THAT(summary(*model).to_string(), ::testing::Not(::testing::HasSubstr("trains its own copy")));
  EXPECT_GT(clip_grad_norm_(*model, 1.0).item<double>(), 0);
  EXPECT_TRUE(state_dict(*model).contains("first.adapter"));
}

TEST(IgnoredParams, AreThoseOfOneCall) {
  Adapted model;
  FullyShardOptions options{.initial_weights = InitialWeights::kUnchecked, .ignored_params = model->adapters()};
  fully_shard(*model->blocks[0], world_mesh(), options);
  options.ignored_params.clear();
  fully_shard(*model, world_mesh(), options);
  for (const auto& adapter : model->adapters()) EXPECT_TRUE(is_dtensor(adapter));
  for (auto& parameter : model->parameters()) {
    parameter.mutable_grad() = torch::zeros_like(parameter);
    parameter.grad().fill_(1);
  }
  clip_grad_value_(*model, 0.5);
  for (const auto& adapter : model->adapters()) EXPECT_TENSORS_EQUAL(full(adapter.grad()), torch::full(adapter.sizes(), 0.5));
  model->zero_grad();
  const auto changed = reshard_parameters(*model);
  EXPECT_TRUE(changed.added.empty() && changed.removed.empty() && changed.moved.empty());
}

TEST(IgnoredParams, SayWhatIsWrong) {
  Adapted model;
  const FullyShardOptions options{.initial_weights = InitialWeights::kUnchecked, .ignored_params = model->adapters()};
  fully_shard(*model->blocks[0], world_mesh());
  EXPECT_THROWS_WITH(fully_shard(*model, world_mesh(), options),
                     "the parameter first.adapter is in ignored_params, but is sharded already");
  EXPECT_THROWS_WITH(fully_shard(*model, world_mesh(), {.ignored_params = {torch::Tensor()}}),
                     "number 0 of ignored_params is undefined");
  torch::nn::Linear all(2, 2);
  EXPECT_THROWS_WITH(fully_shard(all, world_mesh(), {.ignored_params = all->parameters()}), "has no parameter but ignored ones");
  if (world_size() == 1) return;
  Adapted other;
  FullyShardOptions differing{.initial_weights = InitialWeights::kUnchecked};
  if (world_rank() == 0) differing.ignored_params = other->adapters();
  EXPECT_THROWS_WITH(fully_shard(other, world_mesh(), differing), "the ranks' models or options differ");
}

TEST(FullyShardWithoutAMesh, TakesTheWholeWorld) {
  torch::nn::Linear a(4, 3), b(4, 3), c(4, 3);
  const FullyShardOptions unchecked{.initial_weights = InitialWeights::kUnchecked};
  const auto world = init_device_mesh(torch::cuda::is_available() ? torch::kCUDA : torch::kCPU, {world_size()});
  EXPECT_EQ(fully_shard(a, unchecked).mesh(), world);
  EXPECT_EQ(fully_shard({b.ptr()}, unchecked).mesh(), world);
  EXPECT_EQ(replicate(c, unchecked).mesh(), world);
}

} // namespace
} // namespace tessera::testing::ignored_params_test
