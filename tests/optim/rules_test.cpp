// The rules that PyTorch has no optimizer for, beside the papers' formulas, one number after another; and the errors.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <cmath>
#include <memory>
#include <vector>

#include <tessera/tests/optim/optimizers.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::rules_test {
namespace {

using ::testing::SizeIs;
using torch::Tensor;
using Numbers = std::vector<double>;

constexpr int64_t kSteps = 50;

const std::vector<std::vector<int64_t>> kShapes{{}, {1}, {7}, {0}, {3, 5}, {2, 3, 4}};

double sign(double x) { return x > 0 ? 1 : x < 0 ? -1 : 0; }

double norm(const Numbers& numbers) {
  double sum = 0;
  for (const auto number : numbers) sum += number * number;
  return std::sqrt(sum);
}

/// Lion of the paper's algorithm 2, with the weight decay of `optimizer_cases`.
void lion(Numbers& w, const Numbers& g, Numbers& m) {
  for (size_t i = 0; i < w.size(); ++i) {
    w[i] -= 0.01 * (sign(0.9 * m[i] + 0.1 * g[i]) + 0.1 * w[i]);
    m[i] = 0.99 * m[i] + 0.01 * g[i];
  }
}

struct LambSettings {
  double weight_decay, max_coeff;
  bool corrects;
};

/// LAMB of the paper's algorithm 2, with a trust ratio from 0.01 to `max_coeff`.
void lamb(Numbers& w, const Numbers& g, Numbers& m, Numbers& v, int64_t step, const LambSettings& settings) {
  Numbers u(w.size());
  for (size_t i = 0; i < w.size(); ++i) {
    m[i] = 0.9 * m[i] + 0.1 * g[i];
    v[i] = 0.999 * v[i] + 0.001 * g[i] * g[i];
    const double by_m = settings.corrects ? 1 - std::pow(0.9, step) : 1, by_v = settings.corrects ? 1 - std::pow(0.999, step) : 1;
    u[i] = m[i] / by_m / (std::sqrt(v[i] / by_v) + 1e-8) + settings.weight_decay * w[i];
  }
  double ratio = 1;
  if (norm(w) > 0 && norm(u) > 0) ratio = std::min(std::max(norm(w) / norm(u), 0.01), settings.max_coeff);
  for (size_t i = 0; i < w.size(); ++i) w[i] -= 0.02 * ratio * u[i];
}

/// What a rule keeps of a parameter.
struct Kept {
  Numbers w, m, v;
};

Numbers numbers_of(const at::Tensor& tensor) {
  const auto flat = tensor.detach().to(torch::kDouble).contiguous();
  return {flat.data_ptr<double>(), flat.data_ptr<double>() + flat.numel()};
}

void expect_as(const std::string& name, const std::function<void(Kept&, const Numbers&, int64_t)>& rule) {
  SCOPED_TRACE(name);
  const auto cases = optimizer_cases();
  const auto found = std::ranges::find(cases, name, &OptimizerCase::name);
  ASSERT_NE(found, cases.end());
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t{11});
  std::vector<at::Tensor> parameters;
  std::vector<Kept> kept;
  for (const auto& shape : kShapes) parameters.push_back(torch::randn(shape, generator, torch::kDouble).requires_grad_());
  parameters.push_back(torch::zeros({4}, torch::kDouble).requires_grad_()); // whose norm is 0
  for (const auto& parameter : parameters) {
    const auto w = numbers_of(parameter);
    kept.push_back({w, Numbers(w.size()), Numbers(w.size())});
  }
  const auto optimizer = found->make(parameters);
  for (int64_t step = 1; step <= kSteps; ++step) {
    for (size_t i = 0; i < parameters.size(); ++i) {
      parameters[i].mutable_grad() = torch::randn(parameters[i].sizes(), generator, torch::kDouble);
      rule(kept[i], numbers_of(parameters[i].grad()), step);
    }
    optimizer->step();
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto w = numbers_of(parameters[i]);
    for (size_t k = 0; k < w.size(); ++k) EXPECT_NEAR(w[k], kept[i].w[k], 1e-9) << parameters[i].sizes() << " at " << k;
  }
}

TEST(Rules, LionIsThePapers) {
  expect_as("Lion", [](Kept& kept, const Numbers& g, int64_t) { lion(kept.w, g, kept.m); });
}

TEST(Rules, LambIsThePapers) {
  const auto with = [](const LambSettings& settings) {
    return [settings](Kept& kept, const Numbers& g, int64_t step) { lamb(kept.w, g, kept.m, kept.v, step, settings); };
  };
  expect_as("Lamb", with({.weight_decay = 0.1, .max_coeff = 10, .corrects = true}));
  expect_as("Lamb uncorrected", with({.weight_decay = 0, .max_coeff = 0.5, .corrects = false}));
}

TEST(Rules, ParametersWithoutGradientsStay) {
  for (const auto& each : optimizer_cases()) {
    SCOPED_TRACE(each.name);
    auto used = torch::ones({3, 3}).requires_grad_(), unused = torch::ones({3, 3}).requires_grad_();
    const auto optimizer = each.make({used, unused});
    used.mutable_grad() = torch::rand({3, 3}) + 0.5;
    optimizer->step();
    EXPECT_FALSE(torch::equal(used.detach(), torch::ones({3, 3})));
    EXPECT_TRUE(torch::equal(unused.detach(), torch::ones({3, 3})));
  }
}

TEST(Rules, AStepCallsItsClosureWithGradMode) {
  for (const auto& each : optimizer_cases()) {
    SCOPED_TRACE(each.name);
    auto weight = torch::eye(3).requires_grad_();
    const auto optimizer = each.make({weight});
    const torch::NoGradGuard no_grad;
    const auto loss = optimizer->step([&] {
      optimizer->zero_grad();
      auto sum = weight.square().sum();
      sum.backward();
      return sum;
    });
    EXPECT_EQ(loss.item<float>(), 3);
  }
}

TEST(Rules, FusedOptimizersTakeLibTorchsSteps) {
  auto fused_weight = torch::linspace(-1, 1, 12).view({3, 4}).requires_grad_(), weight = fused_weight.detach().clone();
  weight.requires_grad_();
  const auto options = torch::optim::AdamWOptions(0.1).weight_decay(0.2);
  FusedAdamW fused({fused_weight}, options);
  torch::optim::AdamW plain({weight}, options);
  for (int step = 0; step < 5; ++step) {
    fused_weight.mutable_grad() = weight.mutable_grad() = torch::cos(torch::arange(12.0).view({3, 4}) * (step + 1));
    fused.step();
    plain.step();
  }
  EXPECT_TRUE(torch::allclose(fused_weight, weight, 1e-6, 1e-7));
}

/// A graph of before a step must not be gone back through with the weights of after it.
TEST(Rules, FusedStepsOfPlainParametersAreCounted) {
  const auto look = [](const auto& make) {
    const auto weight = torch::ones({3}).requires_grad_(), x = torch::ones({3}).requires_grad_();
    const auto optimizer = make(weight);
    (weight * x).sum().backward();
    const auto stale = (weight * x).sum();
    optimizer->step();
    EXPECT_THROWS_WITH(stale.backward(), "modified by an inplace operation");
  };
  using Parameters = std::vector<Tensor>;
  look([](const Tensor& weight) { return std::make_unique<FusedAdamW>(Parameters{weight}); });
  look([](const Tensor& weight) { return std::make_unique<FusedAdam>(Parameters{weight}); });
  look([](const Tensor& weight) { return std::make_unique<FusedAdagrad>(Parameters{weight}); });
  look([](const Tensor& weight) { return std::make_unique<FusedSGD>(Parameters{weight}, torch::optim::SGDOptions(0.1)); });
}

TEST(Rules, FusedStepsTakeAnyStrides) {
  const auto values = torch::linspace(-1, 1, 12), gradients = torch::linspace(2, -1, 12);
  const auto trained = [&](at::Tensor parameter, const at::Tensor& gradient) {
    parameter.requires_grad_();
    FusedAdamW optimizer({parameter}, torch::optim::AdamWOptions(0.1));
    for (int step = 0; step < 3; ++step) {
      parameter.mutable_grad() = gradient * (step + 1);
      optimizer.step();
    }
    return parameter.detach().contiguous();
  };
  const auto expected = trained(values.view({3, 4}).clone(), gradients.view({3, 4}));
  const auto transposed = [](const at::Tensor& tensor) { return tensor.view({3, 4}).t().contiguous().t(); };
  EXPECT_TRUE(torch::equal(trained(transposed(values), gradients.view({3, 4})), expected));
  EXPECT_TRUE(torch::equal(trained(values.view({3, 4}).clone(), transposed(gradients)), expected));
  auto wide = torch::zeros({3, 8}); // the parameter is every other column of it
  auto strided = wide.slice(1, 0, 8, 2);
  strided.copy_(values.view({3, 4}));
  EXPECT_TRUE(torch::equal(trained(strided, gradients.view({3, 4})), expected));
  EXPECT_TRUE(torch::equal(wide.slice(1, 1, 8, 2), torch::zeros({3, 4})));
}

TEST(Rules, OneOptimizerTakesSeveralDtypes) {
  auto wide = torch::ones({4}, torch::kDouble).requires_grad_(), narrow = torch::ones({4}, torch::kBFloat16).requires_grad_();
  FusedAdamW optimizer({wide, narrow}, torch::optim::AdamWOptions(0.125).weight_decay(0));
  wide.mutable_grad() = torch::ones_like(wide);
  narrow.mutable_grad() = torch::ones_like(narrow);
  optimizer.step();
  EXPECT_NEAR(wide[0].item<double>(), 0.875, 1e-7);
  EXPECT_NEAR(narrow[0].item<double>(), 0.875, 1e-2);
}

TEST(MuonGroups, HoldHiddenMatricesAndTheRest) {
  torch::nn::Sequential model(torch::nn::Embedding(5, 4), torch::nn::Linear(4, 4), torch::nn::LayerNorm(std::vector<int64_t>{4}),
                              torch::nn::Linear(4, 5));
  const auto groups = muon_groups(*model, MuonOptions(0.02), MuonOptions(0.003), {"3.weight"});
  ASSERT_THAT(groups, SizeIs(2));
  EXPECT_THAT(groups[0].params(), SizeIs(1));
  EXPECT_TRUE(groups[0].params()[0].is_same(model->named_parameters()["1.weight"]));
  EXPECT_THAT(groups[1].params(), SizeIs(6));
  const auto& options = static_cast<const MuonOptions&>(groups[1].options());
  EXPECT_FALSE(options.use_muon());
  EXPECT_EQ(options.lr(), 0.003);
  EXPECT_THAT(muon_groups(*torch::nn::LayerNorm(std::vector<int64_t>{4}), {}, {}), SizeIs(1));
  EXPECT_THROWS_WITH(muon_groups(*model, {}, {}, {"lm_head"}), "no parameter's name contains \"lm_head\"");
}

TEST(Rules, RefuseWhatTheyCannotStep) {
  EXPECT_THROWS_WITH(Muon({torch::ones({3, 3}), torch::ones({3})}), "a parameter of shape [3] is no matrix");
  EXPECT_THROWS_WITH(Lion({torch::ones({3})}, LionOptions(-1)), "Lion: lr is -1; it must not be negative");
  EXPECT_THROWS_WITH(Lamb({torch::ones({3})}, LambOptions().min_coeff(2).max_coeff(1)), "min_coeff is 2 and max_coeff 1");
  EXPECT_THROWS_WITH(Adafactor({torch::ones({3})}, AdafactorOptions().d(0.5)), "d is 0.5; it must be at least 1");
  EXPECT_THROWS_WITH(Muon({torch::ones({3, 3})}, MuonOptions().momentum(1)), "momentum is 1; it must be in [0, 1)");
  for (const auto& each : optimizer_cases()) {
    SCOPED_TRACE(each.name);
    auto weight = torch::ones({3, 3}).requires_grad_();
    const auto optimizer = each.make({weight});
    weight.mutable_grad() = torch::ones({3, 3}).to_sparse();
    EXPECT_THROWS_WITH(optimizer->step(), "the gradient of a parameter of shape [3, 3] is sparse");
  }
  Lion lion({torch::ones({3})});
  torch::serialize::OutputArchive archive;
  EXPECT_THROWS_WITH(lion.save(archive), "save tessera::state_dict(module, optimizer) instead");
}

} // namespace
} // namespace tessera::testing::rules_test
