#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include <tessera/activations/recompute.h>
#include <tessera/fsdp/call.h>

#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::mixed_precision_test {
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
  cast->to(twin_device(), torch::kBFloat16);
  auto expected = loss_of(cast, own_batch(0));
  expected.backward();
  Net net = make_net();
  shard_model(net, {"bf16", world_mesh, bf16_options(BufferLayout::kRagged, torch::kFloat)});
  auto loss = loss_of(net, own_batch(0));
  EXPECT_EQ(loss.item<float>(), expected.item<float>());
  loss.backward();
  const auto parameters = cast->named_parameters();
  const auto communicator = init_device_mesh(torch::kCPU, {world_size()}).communicator(0);
  for (const auto& item : net->named_parameters()) {
    auto mean = parameters[item.key()].grad().to(torch::kCPU, torch::kFloat).contiguous();
    communicator->all_reduce(mean, ReduceOp::kAvg, item.key()).wait();
    EXPECT_TRUE(torch::allclose(full(item.value().grad()), mean, 1e-5, 1e-6)) << item.key();
  }
}

TEST(MixedPrecision, OneRankDividesByTheFactorInTheDtypeOfTheReduction) {
  const double gradient = std::exp2(-23); // a fraction of it is none of float16
  torch::nn::Linear linear(torch::nn::LinearOptions(4, 3).bias(false));
  FullyShardOptions options;
  options.mixed_precision.param_dtype = torch::kHalf;
  options.mixed_precision.reduce_dtype = torch::kFloat;
  auto handle = fully_shard(linear, make_device_mesh(test_device_type(), {1}, {world_rank()}), options);
  handle.set_gradient_divide_factor(8);
  (linear->weight * torch::full({3, 4}, gradient, torch::device(test_device()).dtype(torch::kHalf))).sum().backward();
  EXPECT_TENSORS_EQUAL(full(linear->weight.grad()), torch::full({3, 4}, gradient / 8));
}

/// Its formulas run in grad mode, as a forward does, and read leaves beside Float.
TEST(MixedPrecision, DerivativesOfWhichAGraphIsMadeAreTheSame) {
  torch::manual_seed(0);
  torch::nn::Module model;
  const auto scale = model.register_parameter("scale", torch::rand({5}));
  fully_shard(model, world_mesh(), bf16_options(BufferLayout::kRagged, torch::kFloat));
  const auto x = torch::rand({4, 5}, test_device()).requires_grad_(), weights = torch::rand({4, 5}, test_device());
  const auto forward = [&](const torch::Tensor& input) {
    auto y = input * 1;
    y.mul_(scale); // in Float: it is written
    return y * scale;
  };
  const auto gradient = [&](bool create_graph, bool recomputes) {
    const auto y = recomputes ? recompute(forward, x) : forward(x);
    EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
    const auto loss = (y.to(torch::kFloat) * weights).sum();
    return torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/create_graph, create_graph)[0].detach().cpu();
  };
  const auto expected = gradient(false, false);
  EXPECT_TENSORS_EQUAL(gradient(true, false), expected);
  EXPECT_TENSORS_EQUAL(gradient(false, true), expected);
  EXPECT_TENSORS_EQUAL(gradient(true, true), expected);
}

/// On a registered device a copy is an operator of its own, whose schema does not say what it writes.
TEST(MixedPrecision, ReadsOfParametersMayBeConvertedAndCopied) {
  torch::manual_seed(1);
  for (const auto layout : {BufferLayout::kRagged, BufferLayout::kPerParameter}) {
    torch::nn::Linear linear(5, 3);
    fully_shard(linear, world_mesh(), bf16_options(layout, std::nullopt));
    const auto expected = full(linear->weight).flatten().to(torch::kBFloat16).to(torch::kFloat);
    const auto read = linear->weight.view({-1});
    EXPECT_TENSORS_EQUAL(read.to(torch::kFloat).detach().cpu(), expected);
    EXPECT_TENSORS_EQUAL(torch::zeros({15}, test_device()).copy_(read).detach().cpu(), expected);
    EXPECT_TENSORS_EQUAL(torch::empty({0}, test_device()).resize_({15}).copy_(read.detach()).cpu(), expected);
  }
}

TEST(MixedPrecision, ActivationsAreCastBesideALeafButRunningStatisticsAreNot) {
  torch::manual_seed(0);
  torch::nn::Sequential net(torch::nn::Conv1d(3, 4, 1), torch::nn::BatchNorm1d(4));
  fully_shard(*net->ptr(1), world_mesh()); // batch norm computes in fp32 inside a bf16 model, as the CPU kernel wants
  fully_shard(net, world_mesh(), bf16_options(BufferLayout::kRagged, torch::kFloat));
  net->forward(torch::ones({2, 3, 5}, test_device())).sum().backward();
  const auto running = net->ptr(1)->named_buffers()["running_mean"];
  EXPECT_EQ(running.scalar_type(), torch::kFloat);
  EXPECT_NE(running.abs().sum().item<float>(), 0);
  EXPECT_TRUE(net->ptr(0)->named_parameters()["weight"].grad().defined());
}

TEST(MixedPrecision, AnEvaluationInAHookCastsAsAnyOther) {
  Net net = make_net();
  shard_model(net, {"bf16", world_mesh, bf16_options(BufferLayout::kRagged, torch::kFloat)});
  const auto evaluated = [&] {
    const torch::NoGradGuard no_grad;
    return net->forward(global_batch(0));
  };
  const auto expected = evaluated();
  const auto evaluated_in_hook = [&](const torch::Tensor& of, const torch::Tensor& loss) {
    torch::Tensor result;
    const auto hook = of.register_hook([&](const torch::Tensor&) { result = evaluated(); });
    loss.backward();
    of.remove_hook(hook);
    return result;
  };
  const auto own = torch::ones({2}, test_device()).requires_grad_();
  const auto sum = (own * 2).sum();
  EXPECT_TENSORS_EQUAL(evaluated_in_hook(own, (own * 2).sum()), expected) << "of a node without a formula";
  EXPECT_TENSORS_EQUAL(evaluated_in_hook(sum, sum), expected) << "of a node with a formula";
  const auto of_net = net->forward(global_batch(0)).to(torch::kFloat).sum();
  EXPECT_TENSORS_EQUAL(evaluated_in_hook(of_net, of_net), expected) << "of its own backward";
}

TEST(MixedPrecision, AGradientInAHookIsNotRoundedBesideAParameter) {
  torch::manual_seed(0);
  torch::nn::Linear layer(3, 3);
  fully_shard(layer, world_mesh(), bf16_options(BufferLayout::kRagged, torch::kFloat));
  const auto x = torch::ones({2, 3}, test_device()).requires_grad_();
  const auto y = x * 1;
  torch::Tensor sum;
  y.register_hook([&](const torch::Tensor& gradient) { sum = gradient + layer->weight[0]; });
  (y * 3).sum().backward();
  EXPECT_EQ(sum.scalar_type(), torch::kFloat);
}

struct Normed : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return head(torch::relu(norm(convolution(x))).mean(2)); }
  torch::nn::Conv1d convolution{register_module("convolution", torch::nn::Conv1d(3, 4, 1))};
  torch::nn::BatchNorm1d norm{register_module("norm", torch::nn::BatchNorm1d(4))};
  torch::nn::Linear head{register_module("head", torch::nn::Linear(4, 2))};
};

std::shared_ptr<Normed> make_normed() {
  torch::manual_seed(0);
  return std::make_shared<Normed>();
}

std::shared_ptr<Normed> make_normed_twin() {
  auto twin = make_normed();
  twin->to(twin_device());
  return twin;
}

/// The same by hand: the parameters that are not kept are rounded, and what they read.
torch::Tensor by_hand(Normed& net, const torch::Tensor& x) {
  const auto half = [](const torch::Tensor& tensor) { return tensor.to(torch::kBFloat16); };
  const auto y = torch::conv1d(half(x), half(net.convolution->weight), half(net.convolution->bias));
  return torch::linear(half(torch::relu(net.norm(y.to(torch::kFloat))).mean(2)), half(net.head->weight), half(net.head->bias));
}

TEST(MixedPrecision, KeepInFp32NamesTypesOrPlaces) {
  const std::vector<std::vector<std::string>> ways{
      {"BatchNorm1d"}, {"torch::nn::BatchNorm1dImpl"}, {"norm"}, {"norm.weight", "norm.bias"}, {"LayerNorm", "norm"}};
  for (const auto& keep : ways) {
    for (const auto layout : {BufferLayout::kRagged, BufferLayout::kPerParameter}) {
      const auto net = make_normed(), plain = make_normed_twin();
      auto options = bf16_options(layout, std::nullopt);
      options.mixed_precision.keep_in_fp32 = keep;
      fully_shard(*net, world_mesh(), options);
      torch::manual_seed(1);
      const auto x = torch::randn({4, 3, 5});
      const auto expected = by_hand(*plain, x.to(twin_device())), y = net->forward(x.to(test_device()));
      EXPECT_TENSORS_EQUAL(y.cpu(), expected.cpu());
      EXPECT_TENSORS_EQUAL(net->norm->running_var.cpu(), plain->norm->running_var.cpu());
      y.to(torch::kFloat).square().sum().backward();
      expected.to(torch::kFloat).square().sum().backward();
      const auto parameters = plain->named_parameters(); // every rank has the same rows
      for (const auto& item : net->named_parameters())
        EXPECT_TENSORS_CLOSE(full(item.value().grad()), parameters[item.key()].grad().cpu(), 1e-5, 1e-6);
      net->eval();
      EXPECT_EQ(net->forward(x.to(test_device())).scalar_type(), torch::kBFloat16);
    }
  }
}

TEST(MixedPrecision, AModuleThatIsKeptWholeTakesFloatAtItsBoundary) {
  torch::manual_seed(0);
  torch::nn::BatchNorm1d norm(4);
  auto options = bf16_options(BufferLayout::kRagged, torch::kFloat);
  options.mixed_precision.keep_in_fp32 = {"BatchNorm1d"};
  fully_shard(norm, world_mesh(), options);
  const auto x = torch::randn({3, 4}); // bf16 would round it
  torch::nn::BatchNorm1d plain(4);
  plain->to(twin_device());
  EXPECT_TENSORS_EQUAL(call(norm, x.to(test_device())).cpu(), plain(x.to(twin_device())).cpu());
}

TEST(MixedPrecision, ANormThatCannotMixDtypesIsNamed) {
  const auto error = [](torch::nn::Module& module, const FullyShardOptions& options) {
    return error_of([&] { fully_shard(module, world_mesh(), options); });
  };
  const auto bf16 = bf16_options(BufferLayout::kRagged, torch::kFloat);
  EXPECT_THAT(
      error(*make_normed(), bf16),
      ::testing::HasSubstr("fully_shard: the norm norm (BatchNorm1d) would compute with its weight in BFloat16 beside running "
                           "statistics in Float, which its kernel cannot mix: keep it in fp32 with policy.keep_in_fp32 = "
                           "{\"BatchNorm1d\"}, or shard it by itself, before, without a param_dtype"));
  const auto options = torch::nn::InstanceNormOptions(4).affine(true).track_running_stats(true);
  torch::nn::InstanceNorm2d instance(options);
  EXPECT_THAT(error(*instance, bf16), ::testing::HasSubstr("the norm InstanceNorm2d would compute with its weight in BFloat16"));
  auto in_double = make_normed();
  in_double->to(torch::kDouble);
  EXPECT_THAT(error(*in_double, bf16),
              ::testing::HasSubstr("running statistics in Double, which its kernel cannot mix: shard it"));
  auto kept = bf16;
  kept.mixed_precision.keep_in_fp32 = {"head"}; // another one
  EXPECT_THAT(error(*make_normed(), kept), ::testing::HasSubstr("the norm norm (BatchNorm1d)"));
  kept.mixed_precision.keep_in_fp32 = {""};
  EXPECT_THAT(error(*make_normed(), kept), ::testing::HasSubstr("keep_in_fp32 of the mixed precision policy has an empty name"));
  if (world_size() == 1) return;
  kept.mixed_precision.keep_in_fp32 = {world_rank() == 0 ? "BatchNorm1d" : "norm"};
  EXPECT_THAT(error(*make_normed(), kept), ::testing::HasSubstr("the ranks' models or options differ"));
}

TEST(MixedPrecision, NormsThatCanMixDtypesAreTaken) {
  const auto bf16 = bf16_options(BufferLayout::kRagged, torch::kFloat);
  const auto x = torch::randn({2, 4, 3, 3}, test_device());
  const auto runs = [&](auto norm) {
    fully_shard(norm, world_mesh(), bf16);
    return norm(x).scalar_type();
  };
  using namespace torch::nn; // NOLINT(google-build-using-namespace)
  EXPECT_EQ(runs(BatchNorm2d(BatchNorm2dOptions(4).track_running_stats(false))), torch::kBFloat16);
  EXPECT_EQ(runs(InstanceNorm2d(InstanceNorm2dOptions(4).affine(true))), torch::kBFloat16);
  EXPECT_EQ(runs(GroupNorm(GroupNormOptions(2, 4))), torch::kBFloat16);
  EXPECT_EQ(runs(LayerNorm(LayerNormOptions({3}))), torch::kBFloat16);
  BatchNorm2d in_half(4);
  in_half->to(torch::kBFloat16); // its statistics too
  EXPECT_EQ(runs(in_half), torch::kBFloat16);
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
  const auto x = torch::ones({1, 3}, test_device());
  auto outputs = call(module, Nested::Inputs{{x, torch::arange(2, test_device())}, {x, std::nullopt}}, 2)["outputs"];
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
  call(module, torch::ones({4, 3}, test_device()), seen);
  EXPECT_EQ(seen, std::vector<int64_t>{4});
}

TEST(MixedPrecision, CallCastsInputsAndOutputs) {
  torch::manual_seed(0);
  torch::nn::Linear linear(3, 2);
  auto options = bf16_options(BufferLayout::kRagged, torch::kFloat);
  options.mixed_precision.output_dtype = torch::kFloat;
  const auto handle = fully_shard(linear, world_mesh(), options);
  EXPECT_EQ(call(linear, torch::ones({1, 3}, test_device())).scalar_type(), torch::kFloat);
  options.mixed_precision = {.param_dtype = torch::kBFloat16, .cast_forward_inputs = false};
  torch::nn::Linear uncast(3, 2);
  options.initial_weights = InitialWeights::kUnchecked;
  fully_shard(uncast, world_mesh(), options);
  EXPECT_THROWS_WITH(uncast(torch::ones({1, 3}, test_device())), "the same dtype");
}

} // namespace
} // namespace tessera::testing::mixed_precision_test
