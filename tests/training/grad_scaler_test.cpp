#include <tessera/training/grad_scaler.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include <cmath>
#include <limits>
#include <sstream>

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/fsdp/clip_grad.h>
#include <tessera/fsdp/gradients/loss_scale_watch.h>
#include <tessera/fsdp/no_sync.h>
#include <tessera/fsdp/unsharded.h>

#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/subprocess.h>
#include <tessera/tests/support/temporary_folder.h>

namespace tessera::testing::grad_scaler_test {
namespace {

using torch::Tensor;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// A plain parameter whose gradients are as a test says.
struct Weight {
  explicit Weight(double lr = 1) : value(torch::ones({3}).requires_grad_()), optimizer({value}, torch::optim::SGDOptions(lr)) {}
  /// One step with a scaled loss, which overflows or not.
  bool step(GradScaler& scaler, bool overflows = false) {
    optimizer.zero_grad();
    scaler.scale((value * (overflows ? kInfinity : 0.25F)).sum()).backward();
    const bool stepped = scaler.step(optimizer);
    scaler.update();
    return stepped;
  }
  Tensor value;
  torch::optim::SGD optimizer;
};

/// The scales after each of some steps; 'x' overflows.
std::vector<double> scales_of(const GradScalerOptions& options, const std::string& steps) {
  GradScaler scaler(options);
  Weight weight(1e-3);
  std::vector<double> scales;
  for (const char each : steps) {
    EXPECT_EQ(weight.step(scaler, each == 'x'), each != 'x');
    scales.push_back(scaler.get_scale());
  }
  return scales;
}

TEST(GradScaler, GrowsAndFallsAsPyTorchs) {
  const GradScalerOptions options{.init_scale = 16, .growth_interval = 3};
  EXPECT_EQ(scales_of(options, "...x..x..."), (std::vector<double>{16, 16, 32, 16, 16, 16, 8, 8, 8, 16}));
}

TEST(GradScaler, HasDeepSpeedsHysteresisAndMinimum) {
  GradScalerOptions options{.init_scale = 16, .growth_interval = 3, .hysteresis = 2};
  EXPECT_EQ(scales_of(options, "x.x.x...xx"), (std::vector<double>{16, 16, 8, 8, 4, 4, 4, 8, 8, 4}));
  options.consecutive_hysteresis = true;
  EXPECT_EQ(scales_of(options, "x.x.xx"), (std::vector<double>{16, 16, 16, 16, 16, 8}));
  options = {.init_scale = 4, .min_scale = 1.5};
  EXPECT_EQ(scales_of(options, "xx"), (std::vector<double>{2, 1.5}));
  EXPECT_THROWS_WITH(scales_of(options, "xxx"), "overflowed with the loss scale at its minimum, 1.5");
  EXPECT_THROWS_WITH(scales_of(options, "xxx"), "that of a parameter of shape [3], 3 of the 3 numbers there");
  options.at_min_scale = AtMinScale::kStay;
  EXPECT_EQ(scales_of(options, "xxxx"), (std::vector<double>{2, 1.5, 1.5, 1.5}));
}

TEST(GradScaler, DoesNotFallForever) {
  EXPECT_EQ(scales_of({.init_scale = 1}, std::string(126, 'x')).back(), std::exp2(-126));
  EXPECT_THROWS_WITH(scales_of({.init_scale = 1}, std::string(127, 'x')), "the gradients are not finite at any scale");
}

TEST(GradScaler, GrowsAsDeepSpeeds) {
  GradScalerOptions options{.init_scale = 16, .growth_interval = 3, .rule = ScaleRule::kDeepSpeed};
  EXPECT_EQ(scales_of(options, ".......x...."), (std::vector<double>{16, 16, 16, 32, 32, 32, 64, 32, 32, 32, 32, 64}));
  options.growth_interval = 1;
  EXPECT_EQ(scales_of(options, "...x..."), (std::vector<double>{16, 32, 64, 32, 32, 64, 128}));
  options = {.init_scale = 4, .min_scale = 2, .rule = ScaleRule::kDeepSpeed, .at_min_scale = AtMinScale::kStay};
  EXPECT_EQ(scales_of(options, "xxx"), (std::vector<double>{2, 2, 2}));
}

TEST(GradScaler, AFixedScaleStaysAndSkipsOverflows) {
  EXPECT_EQ(scales_of({.init_scale = 128, .growth_interval = 1, .min_scale = 128, .rule = ScaleRule::kFixed}, ".xx."),
            (std::vector<double>{128, 128, 128, 128}));
}

TEST(GradScaler, StopsGrowingAtTheLargestFloat) {
  const auto scales = scales_of({.init_scale = 1e38, .growth_interval = 1}, "..."); // the gradients stay finite: 0.25 times this
  EXPECT_FLOAT_EQ(static_cast<float>(scales[1]), 2e38F);
  EXPECT_EQ(scales[2], scales[1]);
}

TEST(GradScaler, AComplexParameterIsNamed) {
  torch::nn::Module model;
  model.register_parameter("spectrum", torch::ones({8}, torch::kComplexFloat));
  fully_shard(model, world_mesh());
  torch::optim::SGD optimizer(model.parameters(), 0.1);
  GradScaler scaler;
  scaler.scale(torch::real(unsharded(model.parameters()[0]) * 2).sum()).backward();
  EXPECT_THROWS_WITH(scaler.step(optimizer), "the parameter spectrum is ComplexFloat");
  EXPECT_THROWS_WITH(clip_grad_value_(model, 0.5), "clip_grad_value_: the parameter spectrum is ComplexFloat");
  EXPECT_GT(clip_grad_norm_(model, 0.5).item<double>(), 0.5);
}

TEST(GradScaler, UnscalesGradientsAndKeepsTheDtypeOfLosses) {
  GradScaler scaler({.init_scale = 1024});
  EXPECT_EQ(scaler.scale(torch::ones({1}, torch::kHalf)).scalar_type(), torch::kHalf);
  EXPECT_EQ(scaler.scale(std::vector<Tensor>{torch::ones({2}), torch::ones({})})[1].item<double>(), 1024);
  auto half = torch::ones({2}, torch::kHalf).requires_grad_(), both = torch::ones({2}, torch::kDouble).requires_grad_(),
       other = torch::ones({2}, torch::kBFloat16).requires_grad_();
  torch::optim::SGD optimizer({half, both, other}, 0.5);
  scaler.scale((half.to(torch::kFloat) * both.to(torch::kFloat) * other.to(torch::kFloat)).sum()).backward();
  scaler.unscale_(optimizer);
  for (const auto& each : {half, both, other}) EXPECT_EQ(each.grad()[0].item<double>(), 1) << each.dtype();
  EXPECT_TRUE(scaler.step(optimizer));
  EXPECT_EQ(both[0].item<double>(), 0.5); // not divided twice
}

// torch.amp.GradScaler: the product of two tensors without dims is a Float
TEST(GradScaler, ALossInHalfPrecisionMayBeLargeWhenScaled) {
  GradScaler scaler({.init_scale = 65536});
  const auto weight = torch::full({}, 3, torch::kHalf).requires_grad_();
  const auto scaled = scaler.scale(weight * 1);
  EXPECT_EQ(scaled.scalar_type(), torch::kFloat);
  EXPECT_EQ(scaled.item<double>(), 3.0 * 65536);
  EXPECT_EQ(scaler.scale(torch::ones({}, torch::kDouble)).scalar_type(), torch::kDouble);
  (scaled / 1024).backward();
  EXPECT_EQ(weight.grad().item<double>(), 64);
}

/// CUDA's kernel is one that refuses them.
TEST(GradScaler, UnscalesGradientsInBfloat16ByAKernelWithoutIt) {
  torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
  library.impl("_amp_foreach_non_finite_check_and_unscale_", [](at::TensorList parts, Tensor& found, const Tensor& inverse) {
    for (const auto& part : parts) {
      TORCH_CHECK(part.scalar_type() != torch::kBFloat16, "not implemented for 'BFloat16'");
      found.masked_fill_(part.isfinite().all().logical_not(), 1);
      part.mul_(inverse);
    }
  });
  for (const bool overflows : {false, true}) {
    GradScaler scaler({.init_scale = 1024});
    auto first = torch::ones({2}, torch::kBFloat16).requires_grad_(),
         second = torch::ones({3}, torch::kBFloat16).requires_grad_();
    torch::optim::SGD optimizer({first, second}, 0.5);
    scaler.scale((first.sum() + second.sum() * (overflows ? kInfinity : 3)).to(torch::kFloat)).backward();
    EXPECT_EQ(scaler.step(optimizer), !overflows);
    EXPECT_EQ(first.grad()[0].item<double>(), 1);
    EXPECT_EQ(second.grad()[0].item<double>(), overflows ? kInfinity : 3);
  }
}

TEST(GradScaler, UnscalesATiedParameterOnce) {
  GradScaler scaler({.init_scale = 1024});
  const auto weight = torch::ones({2}).requires_grad_();
  torch::optim::SGD optimizer({weight, weight}, 0.5); // as the parameters() of a module with ties
  scaler.scale(weight.sum()).backward();
  scaler.unscale_(optimizer);
  EXPECT_EQ(weight.grad()[0].item<double>(), 1);
}

TEST(GradScaler, DisabledDoesNothing) {
  GradScaler scaler({.enabled = false});
  Weight weight;
  EXPECT_EQ(scaler.get_scale(), 1);
  EXPECT_TRUE(weight.step(scaler));
  EXPECT_EQ(weight.value[0].item<double>(), 0.75);
  EXPECT_TRUE(weight.step(scaler, true));
}

/// The second optimizer has no gradient; its step is no good one.
TEST(GradScaler, DoesNotCountAStepWhoseCheckFailed) {
  GradScaler scaler({.init_scale = 16, .growth_interval = 1});
  Weight weight, other;
  scaler.scale(weight.value.sum()).backward();
  EXPECT_THROWS_WITH(scaler.step(other.optimizer), "no parameter of the optimizer has a gradient");
  EXPECT_THROWS_WITH(scaler.update(), "update() without a step()");
  EXPECT_EQ(scaler.get_scale(), 16);
}

TEST(GradScaler, RefusesCallsInAnotherOrder) {
  GradScaler scaler;
  Weight weight, other;
  const auto backward = [&](Weight& each) {
    each.optimizer.zero_grad();
    scaler.scale(each.value.sum()).backward();
  };
  EXPECT_THROWS_WITH(scaler.update(), "update() without a step()");
  weight.value.sum().backward();
  EXPECT_THROWS_WITH(scaler.step(weight.optimizer), "no loss was scaled since the last update");
  backward(weight);
  scaler.unscale_(weight.optimizer);
  EXPECT_THROWS_WITH(scaler.unscale_(weight.optimizer), "unscale_() was called on this optimizer since the last update()");
  scaler.step(weight.optimizer);
  EXPECT_THROWS_WITH(scaler.unscale_(weight.optimizer), "unscale_() is called after step()");
  EXPECT_THROWS_WITH(scaler.step(weight.optimizer), "step() was called on this optimizer since the last update()");
  EXPECT_THROWS_WITH(scaler.step(other.optimizer), "no parameter of the optimizer has a gradient");
  backward(other);
  scaler.step(other.optimizer); // each optimizer has a state of its own
  scaler.update();
  EXPECT_THROWS_WITH(scaler.unscale_(weight.optimizer), "no loss was scaled since the last update");
  EXPECT_THROWS_WITH(scaler.update(-1.0), "the new scale is -1, but must be above 0");
  scaler.update(8.0);
  EXPECT_EQ(scaler.get_scale(), 8);
  EXPECT_THROWS_WITH(GradScaler({.growth_factor = 1}), "growth_factor is 1, but must be above 1");
  EXPECT_THROWS_WITH(GradScaler({.backoff_factor = 1}), "backoff_factor is 1, but must be above 0 and below 1");
  EXPECT_THROWS_WITH(GradScaler({.growth_interval = 0}), "growth_interval is 0");
  EXPECT_THROWS_WITH(GradScaler({.init_scale = -2}), "init_scale is -2");
  EXPECT_THROWS_WITH(GradScaler({.hysteresis = 0}), "hysteresis is 0");
  EXPECT_THROWS_WITH(GradScaler({.min_scale = 1e9}), "min_scale is 1e+09");
}

TEST(GradScaler, RefusesScalesThatNoFloatHolds) {
  GradScaler scaler;
  auto saved = state_dict(scaler), target = state_dict(scaler);
  for (const double scale : {1e39, 1e-46, std::nan("")}) {
    const auto value = c10::str(" is ", scale, ", but must be above 0 and at most 3.40282e+38");
    EXPECT_THROWS_WITH(GradScaler({.init_scale = scale}), "init_scale" + value);
    EXPECT_THROWS_WITH(scaler.update(scale), "the new scale" + value);
    saved.set("grad_scaler.scale", scale);
    EXPECT_THROWS_WITH(load_state_dict(target, saved), "the saved scale" + value);
  }
  EXPECT_EQ(scaler.get_scale(), 65536);
}

TEST(GradScaler, IsSavedAndLoaded) {
  GradScaler scaler({.init_scale = 16, .growth_interval = 3, .hysteresis = 2});
  Weight weight(1e-3);
  for (const char each : std::string("x..x.")) weight.step(scaler, each == 'x'); // one good step, scale 8
  auto saved = state_dict(scaler);
  GradScaler other({.init_scale = 64, .growth_interval = 3, .hysteresis = 2});
  auto target = state_dict(other);
  load_state_dict(target, saved);
  EXPECT_EQ(other.get_scale(), 8);
  for (const char each : std::string("..x.x")) {
    weight.step(scaler, each == 'x');
    weight.step(other, each == 'x');
    EXPECT_EQ(other.get_scale(), scaler.get_scale());
  }
  saved.set("grad_scaler.scale", 0.0);
  EXPECT_THROWS_WITH(load_state_dict(target, saved), "the saved scale is 0, but must be above 0");
}

TEST(GradScaler, StaysAsItIsWhereALoadLeavesItOut) {
  const SharedFolder folder;
  GradScaler scaler({.init_scale = 16, .growth_interval = 3});
  checkpoint::save(state_dict(scaler), folder.path() / "scaler");
  StateDict others;
  others.set("step", 1);
  checkpoint::save(others, folder.path() / "others");
  auto state = state_dict(scaler); // as the scaler is before the overflow
  Weight weight(1e-3);
  weight.step(scaler, true);
  checkpoint::load(state, folder.path() / "others", {.allow_missing = true, .allow_unused = true});
  EXPECT_EQ(scaler.get_scale(), 8);
  checkpoint::load(state, folder.path() / "scaler", {.allow_unused = true, .filter = [](const std::string&) { return false; }});
  EXPECT_EQ(scaler.get_scale(), 8);
  load_state_dict(state, others, {.strict = false});
  EXPECT_EQ(scaler.get_scale(), 8);
  const auto takes_the_scale = [](const std::string& name) { return name.ends_with("scale"); };
  EXPECT_THROWS_WITH(checkpoint::load(state, folder.path() / "scaler", {.allow_unused = true, .filter = takes_the_scale}),
                     "of the names that begin with \"grad_scaler.\" it must accept all or none");
}

/// Steps of a sharded model in fp32, with a scaler or without. `overflow` sees the loss of each step.
Net train_net(const Strategy& strategy, GradScaler* scaler, const std::function<Tensor(int64_t, Tensor)>& loss_in_step) {
  Net net = make_net();
  shard_model(net, strategy);
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));
  for (int64_t step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    const auto loss = loss_in_step(step, loss_of(net, own_batch(step)));
    if (!loss.defined()) continue;
    (scaler ? scaler->scale(loss) : loss).backward();
    if (scaler) {
      scaler->step(optimizer);
      scaler->update();
    } else {
      optimizer.step();
    }
  }
  return net;
}

TEST(GradScaler, SkipsTheStepOnAllRanksAtOnce) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    GradScaler scaler;
    const bool is_last = world_rank() == world_size() - 1;
    const auto skipped = train_net(strategy, &scaler, [&](int64_t step, const Tensor& loss) {
      return step == 2 && is_last ? loss * kInfinity : loss; // one rank's gradients alone
    });
    EXPECT_EQ(scaler.get_scale(), 32768);
    const auto without =
        train_net(strategy, nullptr, [](int64_t step, const Tensor& loss) { return step == 2 ? Tensor() : loss; });
    for (const auto& item : skipped->named_parameters())
      EXPECT_TENSORS_EQUAL(full(item.value()),
                           full(without->named_parameters()[item.key()])); // fp32: powers of two change nothing
  }
}

TEST(GradScaler, NamesTheGradientsThatOverflowAtTheSmallestScale) {
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Net net = make_net();
    shard_model(net, strategy);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    const auto bias = net->named_parameters().back();
    GradScaler scaler({.init_scale = 2, .min_scale = 2});
    const auto step = [&] {
      scaler.scale(loss_of(net, own_batch(0)) + (unsharded(bias.value()) * kInfinity).sum()).backward();
      scaler.step(optimizer);
      scaler.update();
    };
    EXPECT_THROWS_WITH(step(), "the first gradient that is not finite is that of the parameter " + bias.key());
  }
}

TEST(GradScaler, ChecksWithOneCollectiveOverAllMeshes) {
  torch::manual_seed(1);
  const auto row = init_device_mesh(test_device_type(), {world_size()});
  const auto grid = init_device_mesh(test_device_type(), {1, world_size()}, {"replicate", "shard"});
  torch::nn::Linear first(4, 5), second(5, 3);
  fully_shard(first, row);
  fully_shard(second, grid);
  auto parameters = first->parameters();
  for (const auto& each : second->parameters()) parameters.push_back(each);
  torch::optim::SGD optimizer(parameters, 0.1);
  GradScaler scaler;
  scaler.scale(second(first(torch::ones({2, 4}, test_device()))).sum()).backward();
  process_context().reset_counters();
  scaler.unscale_(optimizer);
  const auto count = process_context().count(CollectiveKind::kAllReduce);
  EXPECT_EQ(count.calls, world_size() > 1 ? 1 : 0);
  EXPECT_TRUE(scaler.step(optimizer));
}

/// An expert of each second rank, which an optimizer of its own steps.
TEST(GradScaler, NeedsAMeshForOptimizersOnDifferentRanks) {
  if (world_size() % 2 != 0) return;
  const auto grid = init_device_mesh(test_device_type(), {world_size() / 2, 2}, {"shard", "expert"});
  const bool is_first_expert = grid.local_rank(1) == 0;
  torch::nn::Linear dense(4, 4), expert(4, 3);
  torch::nn::Sequential net(dense, expert);
  fully_shard(*(*net)[1], grid["shard"], {.initial_weights = InitialWeights::kUnchecked});
  fully_shard(net, world_mesh(), {.initial_weights = InitialWeights::kBroadcast});
  torch::optim::SGD of_dense(dense->parameters(), 0.1), of_expert(expert->parameters(), 0.1);
  const auto step = [&](GradScaler& scaler) {
    const auto hidden = dense(torch::ones({2, 4}, test_device()));
    const auto loss = expert(hidden.detach()).sum() * (is_first_expert ? kInfinity : 1) + hidden.sum();
    scaler.scale(loss).backward();
    for (auto* optimizer : {&of_expert, &of_dense}) {
      scaler.step(*optimizer);
      optimizer->zero_grad();
    }
    scaler.update();
  };
  GradScaler unset, over_all({.mesh = world_mesh()});
  EXPECT_THROWS_WITH(step(unset), "set GradScalerOptions::mesh");
  EXPECT_EQ(unset.get_scale(), 65536);
  step(over_all);
  EXPECT_EQ(over_all.get_scale(), 32768) << "on every rank, also of the other expert";
}

TEST(GradScaler, RefusesGradientsThatWaitForTheirReduction) {
  Net net = make_net();
  shard_model(net, strategies()[0]);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  GradScaler scaler;
  {
    const auto scope = no_sync(*net);
    scaler.scale(loss_of(net, own_batch(0))).backward();
  }
  EXPECT_THROWS_WITH(scaler.step(optimizer), "never reduced");
}

TEST(GradScaler, RefusesAShardedModelWithoutAnyGradient) {
  Net net = make_net();
  shard_model(net, strategies()[0]);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  GradScaler scaler;
  const auto loss = scaler.scale(loss_of(net, own_batch(0)));
  EXPECT_THROWS_WITH(scaler.step(optimizer), "no parameter of the optimizer has a gradient, on any rank");
  loss.backward();
  EXPECT_TRUE(scaler.step(optimizer));
}

// The same training as in grad_scaler.py.

constexpr int64_t kSteps = 12, kRows = 8, kWidth = 6;

torch::nn::Sequential make_layers() {
  torch::nn::Sequential layers(torch::nn::Linear(kWidth, 2 * kWidth), torch::nn::Tanh(), torch::nn::Linear(2 * kWidth, kWidth));
  const torch::NoGradGuard no_grad;
  int64_t number = 0;
  for (auto& parameter : layers->parameters())
    parameter.copy_(0.3 * torch::sin(torch::arange(parameter.numel()) * 0.7 + number++).view_as(parameter));
  return layers;
}

Tensor batch(int64_t step) {
  auto rows = torch::sin(torch::arange(kRows * kWidth) * 0.3 + step).view({kRows, kWidth});
  if (step == 3 || step == 7) rows[0] *= 3000;
  return part_of(rows, world_rank(), world_size()).to(test_device());
}

nlohmann::json train_in_fp16() {
  auto layers = make_layers();
  FullyShardOptions options;
  options.mixed_precision.param_dtype = torch::kHalf;
  options.mixed_precision.reduce_dtype = torch::kFloat;
  for (const size_t i : {0, 2}) fully_shard(*layers->ptr(i), world_mesh(), options);
  fully_shard(layers, world_mesh(), options);
  torch::optim::SGD optimizer(layers->parameters(), 0.1);
  GradScaler scaler({.init_scale = 65536.0 * 16, .growth_interval = 3});
  auto steps = nlohmann::json::array();
  for (int64_t step = 0; step < kSteps; ++step) {
    const auto x = batch(step);
    optimizer.zero_grad();
    const auto loss = (layers->forward(x).to(torch::kFloat) - x.clamp(-1, 1)).square().mean();
    scaler.scale(loss).backward();
    const bool stepped = scaler.step(optimizer);
    scaler.update();
    steps.push_back({mean_over_ranks(loss).item<double>(), scaler.get_scale(), stepped});
  }
  return steps;
}

struct Warnings : c10::WarningHandler {
  void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
  std::vector<std::string> texts;
};

/// The warnings of two backwards of a model in `dtype`, with or without a scaler.
std::vector<std::string> warnings_in(torch::Dtype dtype, bool scales) {
  internal::LossScaleWatch::instance().was_scaled = internal::LossScaleWatch::instance().has_warned = false;
  Warnings warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  auto layers = make_layers();
  FullyShardOptions options;
  options.mixed_precision.param_dtype = dtype;
  fully_shard(layers, world_mesh(), options);
  GradScaler scaler({.enabled = scales});
  for (int64_t step = 0; step < 2; ++step) scaler.scale(layers->forward(batch(step)).square().mean()).backward();
  return warnings.texts;
}

TEST(GradScaler, ItsAbsenceIsWarnedOfOnceInFp16) {
  using ::testing::ElementsAre, ::testing::HasSubstr, ::testing::IsEmpty;
  const auto in_fp16 = warnings_in(torch::kHalf, false);
  if (world_rank() == 0) {
    EXPECT_THAT(in_fp16, ElementsAre(HasSubstr("has gradients in fp16, and no loss was scaled")));
  } else {
    EXPECT_THAT(in_fp16, IsEmpty()) << "one rank warns";
  }
  EXPECT_THAT(warnings_in(torch::kHalf, true), IsEmpty());
  EXPECT_THAT(warnings_in(torch::kBFloat16, false), IsEmpty());
}

TEST(GradScaler, SkipsTheStepsThatPythonsFsdp2Skips) {
  const auto got = train_in_fp16();
  if (world_rank() != 0 || world_size() == 3) return; // 8 rows
  const TemporaryFolder folder;
  const auto ranks = std::to_string(world_size());
  const auto result = run_program({TESSERA_PYTHON, TESSERA_REMEMBERED_SCRIPT, "--key", ranks, "--", TESSERA_PYTHON,
                                   TESSERA_GRAD_SCALER_SCRIPT, ranks, folder.file("store")},
                                  {}, std::chrono::seconds(120));
  ASSERT_EQ(result.status, 0) << result.output;
  std::istringstream lines(result.output);
  size_t step = 0, skipped = 0;
  for (std::string line; std::getline(lines, line);) {
    if (line.empty() || line[0] != '[') continue;
    SCOPED_TRACE("step " + std::to_string(step) + ": " + line + ", here " + got[step].dump());
    const auto expected = nlohmann::json::parse(line);
    EXPECT_EQ(got[step][2], expected[2]);
    EXPECT_EQ(got[step][1], expected[1]);
    if (std::isfinite(expected[0].get<double>())) EXPECT_NEAR(got[step][0].get<double>(), expected[0].get<double>(), 2e-3);
    skipped += expected[2] == false;
    ++step;
  }
  EXPECT_EQ(step, kSteps) << result.output;
  EXPECT_GT(skipped, 1);
  EXPECT_LT(skipped, kSteps / 2);
}

} // namespace
} // namespace tessera::testing::grad_scaler_test
