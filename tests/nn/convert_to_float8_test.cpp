// Models whose Linears multiply in fp8: alone, sharded, in checkpoints, and beside other kinds of parallelism.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/activations/recompute.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/dtensor/api.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/meta_init.h>
#include <tessera/fsdp/no_sync.h>
#include <tessera/fsdp/step_in_backward.h>
#include <tessera/fsdp/unsharded.h>
#include <tessera/nn/float8_linear.h>
#include <tessera/optim/fused.h>
#include <tessera/parallel/parallelize.h>
#include <tessera/parallel/pipeline.h>

#include <optional>
#include <string>
#include <vector>

#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/nn/float8_models.h>
#include <tessera/tests/parallel/pipeline_training.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>
#include <tessera/tests/support/temporary_folder.h>

namespace tessera::testing::convert_to_float8_test {
namespace {

namespace nn = torch::nn;
using float8::expect_close;
using float8::kScalings;
using float8::line;
using float8::make_mlp;
using float8::Mlp;
using float8::rounded;
using float8::rows_of;
using ::testing::ElementsAre;
using torch::Tensor;

TEST(ConvertToFloat8, ConvertsLinearsByName) {
  auto model = make_mlp();
  const auto x = rows_of(0);
  const auto plain = model->forward(x);
  EXPECT_THAT(convert_to_float8(*model, {.except = {"head"}}), ElementsAre("up", "down"));
  const auto parameters = model->named_parameters();
  const auto hidden =
      float8_linear(torch::gelu(float8_linear(x, parameters["up.weight"], parameters["up.bias"])), parameters["down.weight"]);
  EXPECT_TENSORS_EQUAL(model->forward(x), torch::linear(hidden, parameters["head.weight"], parameters["head.bias"]));
  EXPECT_FALSE(torch::equal(model->forward(x), plain));
  EXPECT_THAT(convert_to_float8(*model), ElementsAre("up", "down", "head")) << "again, with other settings";
  EXPECT_TENSORS_EQUAL(model->forward(x), float8_linear(hidden, parameters["head.weight"], parameters["head.bias"]));
  nn::Sequential list(nn::Linear(16, 16), nn::ReLU(), nn::Linear(16, 2));
  EXPECT_THAT(convert_to_float8(*list), ElementsAre("0", "2"));
  EXPECT_EQ(list->forward(x).sizes(), (std::vector<int64_t>{6, 2}));
  EXPECT_THROWS_WITH(convert_to_float8(*model, {.except = {"heads"}}),
                     "except names \"heads\", which is none of the Linears up, down, head");
}

/// Only the product is another one: whatever else a program does with the member, it does with the parameter.
TEST(ConvertToFloat8, TheMemberStandsForTheParameter) {
  auto model = make_mlp();
  convert_to_float8(*model);
  const auto& member = model->up->weight;
  const Tensor parameter = model->named_parameters()["up.weight"];
  EXPECT_FALSE(member.is_same(parameter));
  EXPECT_EQ(member.sizes(), parameter.sizes());
  EXPECT_EQ(member.dtype(), parameter.dtype());
  EXPECT_TRUE(member.requires_grad());
  EXPECT_TENSORS_EQUAL(member.clone(), parameter);
  EXPECT_TENSORS_EQUAL(member.t().contiguous(), parameter.t().contiguous());
  EXPECT_TENSORS_EQUAL(member.t().t().matmul(torch::ones({16})), parameter.matmul(torch::ones({16})));
  EXPECT_TENSORS_EQUAL(torch::cat({member, member}), torch::cat({parameter, parameter}));
  nn::init::constant_(member, 2);
  EXPECT_TENSORS_EQUAL(parameter.detach(), torch::full({48, 16}, 2.f));
  model->up->reset_parameters();
  EXPECT_FALSE(torch::equal(parameter.detach(), torch::full({48, 16}, 2.f)));
  member.square().sum().backward();
  EXPECT_TENSORS_CLOSE(parameter.grad(), 2 * parameter.detach());
  model->to(torch::kDouble);
  EXPECT_EQ(parameter.dtype(), torch::kDouble);
  const auto x = rows_of(0).to(torch::kDouble);
  EXPECT_EQ(model->forward(x).dtype(), torch::kDouble);
  const auto copy = std::dynamic_pointer_cast<nn::LinearImpl>(model->up->clone());
  EXPECT_TENSORS_EQUAL(copy->forward(x), torch::addmm(model->up->bias, x, parameter.t())) << "a copy is plain";
}

TEST(ConvertToFloat8, AFrozenWeightGetsNoGradient) {
  auto model = make_mlp();
  convert_to_float8(*model);
  model->named_parameters()["up.weight"].requires_grad_(false);
  model->forward(rows_of(0)).sum().backward();
  EXPECT_FALSE(model->named_parameters()["up.weight"].grad().defined());
  EXPECT_TRUE(model->named_parameters()["up.bias"].grad().defined());
}

std::vector<Tensor> mean_gradients(nn::Module& model) {
  std::vector<Tensor> gradients;
  const auto mesh = line();
  for (const auto& parameter : model.parameters()) {
    auto gradient = parameter.grad().clone();
    mesh.communicator(0)->all_reduce(gradient.view({-1}), ReduceOp::kAvg, "mean").wait();
    gradients.push_back(gradient);
  }
  return gradients;
}

/// A rank's activations have scales of their own, and so in the twin that each rank trains alone.
void expect_same_training(const Strategy& strategy, Float8Scaling scaling, bool converts_first, bool recomputes) {
  SCOPED_TRACE(c10::str(strategy.name, scaling == Float8Scaling::kRows ? ", rows" : "", converts_first ? "" : ", sharded first",
                        recomputes ? ", recomputed" : ""));
  auto model = make_mlp(), twin = make_mlp();
  convert_to_float8(*twin, {scaling});
  if (converts_first) convert_to_float8(*model, {scaling});
  const auto shard = [&](nn::Module& module) {
    strategy.replicates ? replicate(module, strategy.mesh(), strategy.options)
                        : fully_shard(module, strategy.mesh(), strategy.options);
  };
  shard(*model->up);
  shard(*model);
  if (!converts_first) convert_to_float8(*model, {scaling});
  torch::optim::SGD optimizer(model->parameters(), 0.1), twins(twin->parameters(), 0.1);
  for (int64_t step = 0; step < 3; ++step) {
    const auto x = rows_of(world_rank() + 10 * step);
    const auto run = [&](const Tensor& input) { return model->forward(input); };
    const auto loss = (recomputes ? recompute(run, x) : run(x)).square().mean();
    const auto expected = twin->forward(x).square().mean();
    EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-6 * expected.item<double>());
    loss.backward();
    expected.backward();
    const auto gradients = mean_gradients(*twin);
    for (size_t i = 0; i < gradients.size(); ++i) {
      EXPECT_TENSORS_CLOSE(full(model->parameters()[i].grad()), gradients[i], 1e-5, 1e-6) << i;
      twin->parameters()[i].mutable_grad() =
          full(model->parameters()[i].grad()); // what differs by rounding may round to other codes
    }
    optimizer.step();
    twins.step();
    optimizer.zero_grad();
    twins.zero_grad();
  }
  const auto names = twin->named_parameters();
  for (const auto& item : model->named_parameters()) {
    EXPECT_EQ(item.value().dtype(), torch::kFloat);
    EXPECT_TENSORS_EQUAL(full(item.value()), names[item.key()].detach());
  }
}

TEST(ConvertToFloat8, TrainsUnderEachStrategyAsOneProcess) {
  mesh_device_type = torch::kCPU;
  for (const auto& strategy : sweep(strategies(), 5, is_default)) {
    for (const auto scaling : kScalings) expect_same_training(strategy, scaling, true, scaling == Float8Scaling::kRows);
    expect_same_training(strategy, Float8Scaling::kTensor, false, false);
  }
}

TEST(ConvertToFloat8, TakesAPoliciesDtype) {
  auto model = make_mlp(), twin = make_mlp();
  convert_to_float8(*model);
  convert_to_float8(*twin);
  twin->to(torch::kBFloat16);
  FullyShardOptions options;
  options.mixed_precision = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
  fully_shard(*model, line(), options);
  const auto x = rows_of(world_rank());
  const auto y = model->forward(x), want = twin->forward(x.to(torch::kBFloat16));
  EXPECT_TENSORS_EQUAL(y, want);
  y.sum().backward();
  want.sum().backward();
  for (const auto& parameter : twin->parameters()) parameter.mutable_grad() = parameter.grad().to(torch::kFloat);
  const auto gradients = mean_gradients(*twin);
  for (size_t i = 0; i < gradients.size(); ++i)
    EXPECT_TENSORS_CLOSE(full(model->parameters()[i].grad()), gradients[i], 1e-4, 1e-4);
}

/// The loss of a model after some steps on the same batches.
double trained_loss(std::optional<Float8Scaling> scaling) {
  auto net = make_net();
  if (scaling) convert_to_float8(*net, {*scaling});
  for (auto& block : *net->blocks) fully_shard(*block, line());
  fully_shard(*net, line());
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));
  double last = 0;
  for (int64_t step = 0; step < 40; ++step) {
    optimizer.zero_grad();
    const auto loss = loss_of(net, own_batch(step % 2));
    loss.backward();
    optimizer.step();
    last = mean_over_ranks(loss).item<double>();
  }
  return last;
}

/// In fp16 the scale of such a weight is 0. Adapters begin with zeros.
TEST(ConvertToFloat8, ASmallWeightIsMultipliedInHalf) {
  for (const auto scaling : kScalings) {
    for (const double factor : {0.0, 1e-6}) {
      SCOPED_TRACE(factor);
      const auto make = [&] {
        auto model = make_mlp();
        const torch::NoGradGuard no_grad;
        model->up->weight.mul_(factor);
        return model;
      };
      auto model = make(), twin = make();
      convert_to_float8(*model, {scaling});
      FullyShardOptions options;
      options.mixed_precision.param_dtype = torch::kHalf;
      fully_shard(*model, line(), options);
      twin->to(torch::kHalf);
      convert_to_float8(*twin, {scaling});
      const auto x = rows_of(0).to(torch::kHalf).requires_grad_(), y = x.detach().clone().requires_grad_();
      const auto got = model->up->forward(x), want = twin->up->forward(y);
      EXPECT_TENSORS_EQUAL(got.detach(), want.detach());
      got.sum().backward();
      want.sum().backward();
      EXPECT_TENSORS_EQUAL(x.grad(), y.grad());
    }
  }
}

TEST(ConvertToFloat8, TrainsAsWell) {
  mesh_device_type = torch::kCPU;
  const double plain = trained_loss(std::nullopt);
  for (const auto scaling : kScalings) EXPECT_NEAR(trained_loss(scaling), plain, 0.1 * plain);
}

/// Initializers of modules write through the member.
TEST(ConvertToFloat8, AModelOnMetaIsMaterialized) {
  std::vector<Tensor> values[2];
  for (const bool converts : {false, true}) {
    auto model = on_meta([] { return Mlp(); });
    if (converts) convert_to_float8(*model);
    fully_shard(*model, line());
    torch::manual_seed(6);
    materialize(*model, [](nn::Module& module) {
      if (auto* linear = module.as<nn::LinearImpl>()) linear->reset_parameters();
    });
    for (const auto& parameter : model->parameters()) values[converts].push_back(full(parameter));
    EXPECT_EQ(model->forward(rows_of(0)).sizes(), (std::vector<int64_t>{6, 3}));
  }
  for (size_t i = 0; i < values[0].size(); ++i) EXPECT_TENSORS_EQUAL(values[1][i], values[0][i]);
}

TEST(ConvertToFloat8, EvaluatesWithoutGradMode) {
  auto model = make_mlp(), twin = make_mlp();
  convert_to_float8(*model);
  convert_to_float8(*twin);
  fully_shard(*model, line());
  const auto x = rows_of(0);
  const auto want = twin->forward(x).detach();
  {
    const torch::NoGradGuard no_grad;
    EXPECT_TENSORS_EQUAL(model->forward(x), want);
  }
  const c10::InferenceMode inference;
  EXPECT_TENSORS_EQUAL(model->forward(x), want);
}

/// A checkpoint of a converted model is that of the plain one, and the reverse.
TEST(ConvertToFloat8, ACheckpointHasTheParameters) {
  const SharedFolder folder;
  auto model = make_mlp(), other = Mlp();
  convert_to_float8(*model);
  fully_shard(*model, line());
  fully_shard(*other, line());
  checkpoint::save(state_dict(*model), folder.path() / "converted");
  checkpoint::load(state_dict(*other), folder.path() / "converted");
  EXPECT_EQ(parameter_difference(*other, *make_mlp()), 0);
  convert_to_float8(*other);
  const auto x = rows_of(0);
  EXPECT_TENSORS_EQUAL(other->forward(x).detach(), model->forward(x).detach());
}

/// The ranks of tensor parallelism have the same rows: the numbers are those of one process.
TEST(ConvertToFloat8, UnderTensorParallelism) {
  for (const auto scaling : kScalings) {
    for (const bool converts_first : {false, true}) {
      auto model = make_mlp(), twin = make_mlp();
      convert_to_float8(*twin, {scaling, {"head"}});
      if (converts_first) convert_to_float8(*model, {scaling, {"head"}});
      parallelize(*model, line(), {{"up", Colwise{}}, {"down", Rowwise{}}});
      if (!converts_first) convert_to_float8(*model, {scaling, {"head"}});
      const auto x = rows_of(0).view({2, 3, 16});
      const auto y = model->forward(x), want = twin->forward(x);
      const auto whole = [](const Tensor& tensor) {
        return is_dtensor(tensor) ? DTensor(tensor).full_tensor().detach() : tensor.detach();
      };
      expect_close(whole(y), want.detach().to(torch::kDouble), "result");
      y.square().sum().backward();
      want.square().sum().backward();
      const auto names = twin->named_parameters();
      for (const auto& item : model->named_parameters())
        EXPECT_TENSORS_CLOSE(whole(item.value().grad()), names[item.key()].grad(), 0.2, 1e-2) << item.key();
    }
  }
}

TEST(ConvertToFloat8, UnderTensorParallelismAndSharding) {
  if (world_size() != 4) GTEST_SKIP() << "is for two by two ranks";
  const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
  auto model = make_mlp(), twin = make_mlp();
  convert_to_float8(*twin, {.except = {"head"}});
  convert_to_float8(*model, {.except = {"head"}});
  parallelize(*model, mesh["tp"], {{"up", Colwise{}}, {"down", Rowwise{}}});
  fully_shard(*model->up, mesh["dp"]);
  fully_shard(*model, mesh["dp"]);
  const auto x = rows_of(mesh.local_rank("dp")).view({2, 3, 16});
  const auto whole = [](const Tensor& tensor) {
    return is_dtensor(tensor) ? DTensor(tensor).full_tensor().detach() : tensor.detach();
  };
  const auto y = model->forward(x), want = twin->forward(x);
  expect_close(whole(y), want.detach().to(torch::kDouble), "result");
  y.square().sum().backward();
  want.square().sum().backward();
  const auto gradients = mean_gradients(*twin);
  for (size_t i = 0; i < gradients.size(); ++i)
    EXPECT_TENSORS_CLOSE(whole(model->parameters()[i].grad()), gradients[i], 0.2, 1e-2) << i;
}

/// Also where the backward of a stage comes in two halves. Each micro-batch has scales of its own, as it has alone.
TEST(ConvertToFloat8, InAPipeline) {
  const auto mesh = init_device_mesh(torch::kCPU, {world_size()}, {"pp"});
  const TrainingPlan plan{.steps = 2, .micro_batches = 4};
  const auto make = [] {
    auto model = seeded_pipeline_gpt({.depth = 4});
    convert_to_float8(*model);
    return model;
  };
  const auto expected = train_alone(make(), plan);
  for (const auto kind : {PipelineScheduleKind::k1F1B, PipelineScheduleKind::kZeroBubbleH1}) {
    auto model = make();
    Pipeline pipeline(split(layers_of(model), mesh["pp"]), kind, text_loss());
    expect_same_training(train_in_pipeline(pipeline, plan), expected, 1e-4);
  }
}

/// Accumulated, offloaded, stepped in backward, and sent in fewer bits: the library's parts know nothing of the products.
TEST(ConvertToFloat8, BesideWhatElseShardsAModel) {
  const auto losses = [](const FullyShardOptions& options, bool converts) {
    auto model = make_mlp();
    if (converts) convert_to_float8(*model);
    fully_shard(*model->up, line(), options);
    fully_shard(*model, line(), options);
    FusedAdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
    const auto stepping = step_in_backward(*model, optimizer);
    std::vector<double> all;
    for (int64_t step = 0; step < 4; ++step) {
      const auto x = rows_of(world_rank() + 10 * step);
      std::optional<NoSync> accumulates;
      if (step % 2 == 0) accumulates.emplace(*model);
      const auto loss = model->forward(x).square().mean();
      loss.backward();
      all.push_back(mean_over_ranks(loss).item<double>());
    }
    return all;
  };
  mesh_device_type = torch::kCPU;
  const auto plain = losses({}, true);
  const TemporaryFolder folder;
  EXPECT_EQ(losses({.offload = offload_to_files(folder.path().string(), false)}, true), plain);
  const auto coded = losses({.communication = communication_of("gather=int8, reduction=int8, smallest=0, error_feedback")}, true);
  for (size_t i = 0; i < plain.size(); ++i) EXPECT_NEAR(coded[i], plain[i], 0.1 * plain[i]);
}

} // namespace
} // namespace tessera::testing::convert_to_float8_test
