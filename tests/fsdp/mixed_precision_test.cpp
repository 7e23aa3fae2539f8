#include <gtest/gtest.h>

#include <tessera/fsdp/call.h>

#include <tessera/tests/fsdp/sharded_model.h>

namespace tessera::testing {
namespace {

FullyShardOptions bf16_options(BufferLayout layout, std::optional<c10::ScalarType> reduce_dtype) {
  FullyShardOptions options;
  options.layout = layout;
  options.mixed_precision.param_dtype = torch::kBFloat16;
  options.mixed_precision.reduce_dtype = reduce_dtype;
  return options;
}

TEST(MixedPrecision, ComputesInBFloat16AndKeepsFloatShardsAndGradients) {
  for (const auto layout : {BufferLayout::kRagged, BufferLayout::kPerParameter}) {
    for (const auto reduce_dtype :
         {std::optional<c10::ScalarType>(), std::optional(torch::kFloat), std::optional(torch::kBFloat16)}) {
      Net net = make_net();
      shard_model(net, {"bf16", world_mesh, bf16_options(layout, reduce_dtype)});
      const auto logits = net->forward(global_batch(0));
      EXPECT_EQ(logits.scalar_type(), torch::kBFloat16);
      logits.to(torch::kFloat).square().mean().backward();
      for (const auto& item : net->named_parameters()) {
        EXPECT_EQ(item.value().scalar_type(), torch::kFloat) << item.key();
        EXPECT_EQ(item.value().grad().scalar_type(), torch::kFloat) << item.key();
      }
    }
  }
}

/// What FSDP2's policy means: a model whose parameters were cast to bf16, run on the whole batch.
TEST(MixedPrecision, LossAndGradientsAreThoseOfTheCastModel) {
  Net cast = make_net();
  cast->to(torch::kBFloat16);
  auto expected = loss_of(cast, part_of(global_batch(0), world_rank(), world_size()));
  expected.backward();
  Net net = make_net();
  shard_model(net, {"bf16", world_mesh, bf16_options(BufferLayout::kRagged, torch::kFloat)});
  auto loss = loss_of(net, part_of(global_batch(0), world_rank(), world_size()));
  EXPECT_EQ(loss.item<float>(), expected.item<float>());
  loss.backward();
  const auto parameters = cast->named_parameters();
  const auto communicator = world_mesh().communicator(0);
  for (const auto& item : net->named_parameters()) {
    auto mean = parameters[item.key()].grad().to(torch::kFloat).contiguous();
    communicator->all_reduce(mean, ReduceOp::kAvg, item.key()).wait();
    EXPECT_TRUE(torch::allclose(full(item.value().grad()), mean, 1e-5, 1e-6)) << item.key();
  }
}

TEST(MixedPrecision, ActivationsAreCastBesideALeafButRunningStatisticsAreNot) {
  torch::manual_seed(0);
  torch::nn::Sequential net(torch::nn::Conv1d(3, 4, 1), torch::nn::BatchNorm1d(4));
  fully_shard(*net->ptr(1), world_mesh()); // batch norm computes in fp32 inside a bf16 model, as the CPU kernel wants
  fully_shard(net, world_mesh(), bf16_options(BufferLayout::kRagged, torch::kFloat));
  net->forward(torch::ones({2, 3, 5})).sum().backward();
  const auto running = net->ptr(1)->named_buffers()["running_mean"];
  EXPECT_EQ(running.scalar_type(), torch::kFloat);
  EXPECT_NE(running.abs().sum().item<float>(), 0);
  EXPECT_TRUE(net->ptr(0)->named_parameters()["weight"].grad().defined());
}

struct Nested : torch::nn::Module {
  using Inputs = std::vector<std::pair<torch::Tensor, std::optional<torch::Tensor>>>;
  std::map<std::string, std::vector<torch::Tensor>> forward(const Inputs& inputs, int64_t scale) {
    EXPECT_EQ(inputs[0].first.scalar_type(), torch::kBFloat16);
    EXPECT_EQ(inputs[0].second->scalar_type(), torch::kLong);
    EXPECT_FALSE(inputs[1].second.has_value());
    return {{"outputs", {linear(inputs[0].first) * scale, *inputs[0].second}}};
  }
  torch::nn::Linear linear{register_module("linear", torch::nn::Linear(3, 2))};
};

TEST(MixedPrecision, CallCastsInsideNestedValues) {
  torch::manual_seed(0);
  const auto module = std::make_shared<Nested>();
  auto options = bf16_options(BufferLayout::kRagged, torch::kFloat);
  options.mixed_precision.output_dtype = torch::kDouble;
  fully_shard(*module, world_mesh(), options);
  const auto x = torch::ones({1, 3});
  auto outputs = call(module, Nested::Inputs{{x, torch::arange(2)}, {x, std::nullopt}}, 2)["outputs"];
  EXPECT_EQ(outputs[0].scalar_type(), torch::kDouble);
  EXPECT_EQ(outputs[1].scalar_type(), torch::kLong);
  EXPECT_EQ(x.scalar_type(), torch::kFloat);
}

struct Noting : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x, std::vector<int64_t>& seen) {
    seen.push_back(x.size(0));
    return linear(x);
  }
  torch::nn::Linear linear{register_module("linear", torch::nn::Linear(3, 2))};
};

TEST(MixedPrecision, CallPassesOnWhatHoldsNoTensor) {
  torch::manual_seed(0);
  const auto module = std::make_shared<Noting>();
  fully_shard(*module, world_mesh(), bf16_options(BufferLayout::kRagged, torch::kFloat));
  std::vector<int64_t> seen;
  call(module, torch::ones({4, 3}), seen);
  EXPECT_EQ(seen, std::vector<int64_t>{4});
}

TEST(MixedPrecision, CallCastsInputsAndOutputs) {
  torch::manual_seed(0);
  torch::nn::Linear linear(3, 2);
  auto options = bf16_options(BufferLayout::kRagged, torch::kFloat);
  options.mixed_precision.output_dtype = torch::kFloat;
  const auto handle = fully_shard(linear, world_mesh(), options);
  EXPECT_EQ(call(linear, torch::ones({1, 3})).scalar_type(), torch::kFloat);
  options.mixed_precision.cast_forward_inputs = false;
  torch::nn::Linear uncast(3, 2);
  options.initial_weights = InitialWeights::kUnchecked;
  fully_shard(uncast, world_mesh(), options);
  EXPECT_ANY_THROW(uncast(torch::ones({1, 3})));
}

} // namespace
} // namespace tessera::testing
