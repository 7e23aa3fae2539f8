// Models train on the simulated device as on the CPU.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <tessera/tests/support/simulated_device/simulated_device.h>

namespace tessera::testing::sim::models_test {
namespace {

namespace nn = torch::nn;
using torch::Tensor;

struct Model : nn::Module {
  virtual Tensor loss(const Tensor& batch) = 0;
  virtual Tensor draw_batch() const = 0;
};

struct Mlp : Model {
  Mlp() {
    net = register_module("net", nn::Sequential(nn::Linear(16, 64), nn::GELU(), nn::Dropout(0.1), nn::Linear(64, 64), nn::ReLU(),
                                                nn::Linear(64, 8)));
  }
  Tensor loss(const Tensor& batch) override {
    return torch::cross_entropy_loss(net->forward(batch), batch.slice(1, 0, 8).argmax(1));
  }
  Tensor draw_batch() const override { return torch::randn({32, 16}); }
  nn::Sequential net{nullptr};
};

struct Attention : Model {
  Attention() {
    embedding = register_module("embedding", nn::Embedding(50, 32));
    first_norm = register_module("first_norm", nn::LayerNorm(nn::LayerNormOptions({32})));
    second_norm = register_module("second_norm", nn::LayerNorm(nn::LayerNormOptions({32})));
    attention = register_module("attention", nn::MultiheadAttention(nn::MultiheadAttentionOptions(32, 4)));
    head = register_module("head", nn::Linear(32, 50));
  }
  Tensor loss(const Tensor& batch) override {
    auto x = first_norm(embedding(batch));
    x = x + std::get<0>(attention(x, x, x));
    const auto heads = second_norm(x).unflatten(2, {4, 8}).transpose(1, 2);
    x = x + at::scaled_dot_product_attention(heads, heads, heads, {}, 0.0, true).transpose(1, 2).flatten(2);
    return torch::cross_entropy_loss(head(x).flatten(0, 1), batch.flatten());
  }
  Tensor draw_batch() const override { return torch::randint(0, 50, {6, 4}); }
  nn::Embedding embedding{nullptr};
  nn::LayerNorm first_norm{nullptr}, second_norm{nullptr};
  nn::MultiheadAttention attention{nullptr};
  nn::Linear head{nullptr};
};

struct Convolution : Model {
  Convolution() {
    convolution = register_module("convolution", nn::Conv2d(nn::Conv2dOptions(3, 8, 3).padding(1)));
    batch_norm = register_module("batch_norm", nn::BatchNorm2d(8));
    group_norm = register_module("group_norm", nn::GroupNorm(2, 8));
    gru = register_module("gru", nn::GRU(nn::GRUOptions(32, 16).batch_first(true)));
    lstm = register_module("lstm", nn::LSTM(nn::LSTMOptions(16, 16).batch_first(true)));
    head = register_module("head", nn::Linear(16, 4));
  }
  Tensor loss(const Tensor& batch) override {
    const auto pooled = torch::max_pool2d(torch::relu(group_norm(batch_norm(convolution(batch)))), 2); // [N, 8, 4, 4]
    const auto rows = pooled.permute({0, 2, 1, 3}).flatten(2);                                         // [N, 4, 32]
    const auto last = std::get<0>(lstm(std::get<0>(gru(rows)))).select(1, -1);
    return (head(last) - batch.mean({2, 3}).mean(1, true)).pow(2).mean();
  }
  Tensor draw_batch() const override { return torch::randn({5, 3, 8, 8}); }
  nn::Conv2d convolution{nullptr};
  nn::BatchNorm2d batch_norm{nullptr};
  nn::GroupNorm group_norm{nullptr};
  nn::GRU gru{nullptr};
  nn::LSTM lstm{nullptr};
  nn::Linear head{nullptr};
};

struct Update {
  virtual ~Update() = default;
  virtual void step() = 0;
};
using MakeUpdate = std::function<std::unique_ptr<Update>(const std::vector<Tensor>& parameters)>;

template <typename Optimizer, typename Options>
MakeUpdate optimizer(const Options& options) {
  struct Wrapped final : Update {
    Wrapped(const std::vector<Tensor>& parameters, const Options& options) : optimizer(parameters, options) {}
    void step() override { optimizer.step(); }
    Optimizer optimizer;
  };
  return [options](const std::vector<Tensor>& parameters) { return std::make_unique<Wrapped>(parameters, options); };
}

struct Moments : Update {
  explicit Moments(const std::vector<Tensor>& trained) : parameters(trained) {
    for (const auto& parameter : parameters) {
      first.push_back(torch::zeros_like(parameter));
      second.push_back(torch::zeros_like(parameter));
      steps.push_back(torch::zeros({}, parameter.options().requires_grad(false)));
    }
  }
  std::vector<Tensor> gradients() const {
    std::vector<Tensor> all;
    for (const auto& parameter : parameters) all.push_back(parameter.grad());
    return all;
  }
  std::vector<Tensor> parameters, first, second, steps;
};

struct Foreach final : Moments {
  using Moments::Moments;
  void step() override {
    const torch::NoGradGuard no_grad;
    const auto grads = gradients();
    at::_foreach_mul_(first, 0.9);
    at::_foreach_add_(first, grads, 0.1);
    at::_foreach_mul_(second, 0.99);
    at::_foreach_addcmul_(second, grads, grads, 0.01);
    auto roots = at::_foreach_sqrt(second);
    at::_foreach_add_(roots, 1e-8);
    at::_foreach_addcdiv_(parameters, first, roots, -1e-2);
  }
};

struct Fused final : Moments {
  using Moments::Moments;
  void step() override {
    const torch::NoGradGuard no_grad;
    at::_foreach_add_(steps, 1);
    at::_fused_adamw_(parameters, gradients(), first, second, {}, steps, 1e-2, 0.9, 0.999, 0.01, 1e-8, false, false);
  }
};

template <typename T>
MakeUpdate update() {
  return [](const std::vector<Tensor>& parameters) { return std::make_unique<T>(parameters); };
}

/// Losses of five steps with clipping, then the sum of all parameters and buffers.
std::vector<double> train(const std::function<std::shared_ptr<Model>()>& make_model, const MakeUpdate& make_update,
                          const torch::Device& device) {
  torch::manual_seed(7);
  const auto model = make_model();
  std::vector<Tensor> batches;
  for (int step = 0; step < 5; ++step) batches.push_back(model->draw_batch());
  model->to(device);
  const auto parameters = model->parameters();
  const auto update = make_update(parameters);
  std::vector<Tensor> losses;
  for (const auto& batch : batches) {
    model->zero_grad();
    const auto loss = model->loss(batch.to(device, /*non_blocking=*/true));
    loss.backward();
    nn::utils::clip_grad_norm_(parameters, 0.5);
    update->step();
    losses.push_back(loss.detach());
  }
  std::vector<double> values;
  for (const auto& loss : losses) values.push_back(loss.item<double>());
  double sum = 0;
  for (const auto& tensors : {parameters, model->buffers()})
    for (const auto& tensor : tensors) sum += tensor.detach().cpu().to(torch::kDouble).abs().sum().item<double>();
  values.push_back(sum);
  return values;
}

struct Case {
  const char* name;
  std::function<std::shared_ptr<Model>()> model;
  double tolerance; ///< relative, in float
};

std::vector<Case> cases() {
  return {{"mlp", [] { return std::make_shared<Mlp>(); }, 1e-6},
          {"attention", [] { return std::make_shared<Attention>(); }, 1e-6},
          {"convolution", [] { return std::make_shared<Convolution>(); }, 1e-5}};
}

std::vector<std::pair<const char*, MakeUpdate>> updates() {
  return {{"sgd", optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.05).momentum(0.9))},
          {"adamw", optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2))},
          {"foreach", update<Foreach>()},
          {"fused", update<Fused>()}};
}

class Models : public ::testing::Test {
 protected:
  void SetUp() override {
    enable();
    configure({.delays = {.seed = 1}});
    reset_races();
    at::globalContext().setSDPUseFlash(false); // the CPU's own attention rounds otherwise than the parts that the device computes
  }
  void TearDown() override {
    at::globalContext().setSDPUseFlash(true);
    torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat));
  }
};

void expect_close(const std::vector<double>& got, const std::vector<double>& expected, double tolerance) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i)
    EXPECT_NEAR(got[i], expected[i], tolerance * std::max(1.0, std::abs(expected[i]))) << "value " << i;
}

TEST_F(Models, TrainAsOnTheCpu) {
  for (const auto& each : cases()) {
    for (const auto& [update_name, make_update] : updates()) {
      SCOPED_TRACE(std::string(each.name) + " with " + update_name);
      expect_close(train(each.model, make_update, kDevice), train(each.model, make_update, torch::kCPU), each.tolerance);
      EXPECT_TRUE(races().empty()) << races().begin()->first;
    }
  }
}

TEST_F(Models, DifferFromTheCpuByRoundingAlone) {
  torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kDouble));
  for (const auto& each : cases()) {
    SCOPED_TRACE(each.name);
    expect_close(train(each.model, update<Foreach>(), kDevice), train(each.model, update<Foreach>(), torch::kCPU), 1e-14);
  }
}

TEST_F(Models, DelaysChangeNoNumber) {
  const auto attention = cases()[1];
  const auto expected = train(attention.model, update<Foreach>(), kDevice);
  for (uint64_t seed = 0; seed < 3; ++seed) {
    configure({.delays = {.seed = seed, .max_us = 20, .slow_factor = 4}});
    EXPECT_EQ(train(attention.model, update<Foreach>(), kDevice), expected) << "seed " << seed;
  }
  EXPECT_TRUE(races().empty());
}

TEST_F(Models, AResizeWaitsForWhatIsUnderWay) {
  configure({.delays = {.seed = 1, .max_us = 500}});
  for (int i = 0; i < 20; ++i) {
    auto read = torch::full({64}, 1.0, kDevice);
    const auto doubled = read * 2;
    read = at::Tensor(); // its memory is the next tensor's
    auto grown = torch::full({32}, 5.0, kDevice);
    grown.resize_({64});
    EXPECT_TRUE(grown.slice(0, 0, 32).cpu().equal(torch::full({32}, 5.0)));
    EXPECT_TRUE(doubled.cpu().equal(torch::full({64}, 2.0)));
  }
}

TEST_F(Models, ComplexNumbersAreConjugated) {
  const auto on_cpu = torch::complex(torch::arange(6.0), torch::ones({6}));
  const auto on_device = on_cpu.to(kDevice);
  EXPECT_TRUE(on_device.conj().clone().cpu().equal(on_cpu.conj()));
  EXPECT_TRUE((on_device.conj() * on_device).cpu().equal(on_cpu.conj() * on_cpu));
  EXPECT_TRUE(torch::imag(on_device.conj()).add(1).cpu().equal(torch::imag(on_cpu.conj()).add(1))); // a negative view
  EXPECT_TRUE(torch::zeros_like(on_device).copy_(on_cpu.conj()).cpu().equal(on_cpu.conj()));
}

} // namespace
} // namespace tessera::testing::sim::models_test
