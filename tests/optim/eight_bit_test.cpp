// AdamW with moments in 8 bits: the formulas, one number after another; its kernel beside ATen's operators; its memory.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include <tessera/optim/adamw_8bit.h>
#include <tessera/optim/kernels/dynamic_table.h>

namespace tessera::testing::eight_bit_test {
namespace {

using ::testing::SizeIs;

at::Generator generator_of(uint64_t seed) { return at::make_generator<at::CPUGeneratorImpl>(seed); }

/// A moment in 8 bits, as the paper and bitsandbytes keep it.
class Blocks {
 public:
  Blocks(size_t size, bool is_signed) : table_(internal::dynamic_table(is_signed)), codes_(size), largest_((size + 255) / 256) {}
  float at(size_t i) const { return table_[codes_[i]] * largest_[i / 256]; }
  void keep(const std::vector<float>& values) {
    std::fill(largest_.begin(), largest_.end(), 0.F);
    for (size_t i = 0; i < values.size(); ++i) largest_[i / 256] = std::max(largest_[i / 256], std::abs(values[i]));
    for (size_t i = 0; i < values.size(); ++i)
      codes_[i] = nearest(values[i] / std::max(largest_[i / 256], 1e-38F), values[i] < 0);
  }
  const std::vector<uint8_t>& codes() const { return codes_; }

 private:
  uint8_t nearest(float value, bool is_negative) const {
    size_t best = 0;
    while (best + 1 < table_.size() && value > (table_[best] + table_[best + 1]) * 0.5F) ++best;
    if ((table_[best] < 0) != is_negative) best = is_negative ? best - 1 : best + 1;
    return static_cast<uint8_t>(best);
  }
  std::vector<float> table_;
  std::vector<uint8_t> codes_;
  std::vector<float> largest_;
};

TEST(EightBit, RoundsMomentsToTheNearestCode) {
  constexpr size_t kSize = 3 * 256 + 17;
  const auto generator = generator_of(5);
  auto weight = torch::randn({static_cast<int64_t>(kSize)}, generator).requires_grad_();
  std::vector<float> w(weight.data_ptr<float>(), weight.data_ptr<float>() + kSize);
  Blocks averages(kSize, true), squares(kSize, false);
  AdamW8bit optimizer({weight}, AdamW8bitOptions(0.01).weight_decay(0.1).min_8bit_size(1));
  for (int step = 1; step <= 50; ++step) {
    weight.mutable_grad() = torch::randn({static_cast<int64_t>(kSize)}, generator) * std::pow(10.0, step % 3 - 1);
    weight.mutable_grad().narrow(0, 300, 40).zero_();
    const auto* g = weight.grad().data_ptr<float>();
    optimizer.step();
    std::vector<float> m(kSize), v(kSize);
    for (size_t i = 0; i < kSize; ++i) {
      m[i] = averages.at(i) * 0.9F + g[i] * 0.1F;
      v[i] = squares.at(i) * 0.999F + 0.001F * g[i] * g[i];
      w[i] *= 1 - 0.01F * 0.1F;
      w[i] -= static_cast<float>(0.01 / (1 - std::pow(0.9, step))) * m[i] /
              (std::sqrt(v[i]) / static_cast<float>(std::sqrt(1 - std::pow(0.999, step))) + 1e-8F);
    }
    averages.keep(m);
    squares.keep(v);
  }
  const auto& state = static_cast<const AdamW8bitParamState&>(*optimizer.state().at(weight.unsafeGetTensorImpl()));
  // Products are rounded in another order here, so that a value between two codes may take the other one.
  const auto differing = [](const at::Tensor& codes, const std::vector<uint8_t>& expected) {
    int64_t count = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      const int distance = std::abs(static_cast<int>(codes.data_ptr<uint8_t>()[i]) - static_cast<int>(expected[i]));
      EXPECT_LE(distance, 1) << i;
      count += distance;
    }
    return count;
  };
  EXPECT_LE(differing(state.exp_avg(), averages.codes()), 4);
  EXPECT_LE(differing(state.exp_avg_sq(), squares.codes()), 4);
  for (size_t i = 0; i < kSize; ++i) EXPECT_NEAR(weight.data_ptr<float>()[i], w[i], 2e-3) << i;
}

TEST(EightBit, HasTheCodesOfBitsandbytes) {
  const auto with_sign = internal::dynamic_table(true), without = internal::dynamic_table(false);
  ASSERT_THAT(with_sign, SizeIs(256));
  ASSERT_THAT(without, SizeIs(256));
  EXPECT_FLOAT_EQ(with_sign.front(), -0.99296875F);
  EXPECT_FLOAT_EQ(with_sign[254], 0.99296875F);
  EXPECT_EQ(with_sign.back(), 1);
  EXPECT_EQ(with_sign[127], 0);
  EXPECT_FLOAT_EQ(with_sign[128], 5.5e-7F);
  EXPECT_EQ(without.front(), 0);
  EXPECT_FLOAT_EQ(without[1], 3.25e-7F);
  EXPECT_FLOAT_EQ(without[254], 0.996484375F);
  EXPECT_EQ(without.back(), 1);
}

TEST(EightBit, TrainsAsAdamWDoes) {
  const auto data = torch::linspace(-1, 1, 64).view({32, 2});
  const auto trained = [&](auto make) {
    torch::manual_seed(3);
    torch::nn::Sequential model(torch::nn::Linear(2, 128), torch::nn::Tanh(), torch::nn::Linear(128, 64), torch::nn::Tanh(),
                                torch::nn::Linear(64, 1));
    const auto optimizer = make(model->parameters());
    at::Tensor loss;
    for (int step = 0; step < 200; ++step) {
      optimizer->zero_grad();
      loss = torch::mse_loss(model->forward(data), (3 * data).sin().sum(1, true));
      loss.backward();
      optimizer->step();
    }
    return loss.item<double>();
  };
  const auto in_8_bits = trained([](const auto& parameters) { return std::make_unique<AdamW8bit>(parameters, 3e-3); });
  const auto plain = trained([](const auto& parameters) { return std::make_unique<torch::optim::AdamW>(parameters, 3e-3); });
  EXPECT_LT(plain, 0.05);
  EXPECT_LT(in_8_bits, 2 * plain + 0.01);
}

/// AdamW with moments in 8 bits, of ATen's operators alone.
class EightBitOfOperators {
 public:
  explicit EightBitOfOperators(const at::Tensor& parameter)
      : parameter_(parameter.detach().clone()),
        blocks_(torch::arange(parameter.numel()).bitwise_right_shift(8)),
        codes_(torch::zeros({parameter.numel()}, torch::kByte)),
        squared_(codes_.clone()),
        absmax_(torch::zeros({(parameter.numel() + 255) / 256})),
        squared_absmax_(absmax_.clone()) {}

  void step(const at::Tensor& gradient_of_step, const AdamW8bitOptions& options) {
    const auto [beta1, beta2] = options.betas();
    const auto gradient = gradient_of_step.to(torch::kFloat).reshape({-1});
    ++steps_;
    const auto average = moment(codes_, true, absmax_).mul_(beta1).add_(gradient, 1 - beta1);
    const auto square = moment(squared_, false, squared_absmax_).mul_(beta2).addcmul_(gradient, gradient, 1 - beta2);
    // MKL's root of floats, which ATen takes on the CPU, is not always rounded to the nearest one.
    const auto root = square.to(torch::kDouble).sqrt().to(torch::kFloat);
    const auto denominator = root.div(std::sqrt(1 - std::pow(beta2, steps_))).add_(options.eps());
    const auto update = average.div(denominator).mul_(-options.lr() / (1 - std::pow(beta1, steps_)));
    absmax_ = largest(average.abs());
    squared_absmax_ = largest(square);
    const auto relative = average.div(scales(absmax_));
    const auto codes = internal::nearest_codes(relative, true).to(torch::kInt);
    const auto is_negative = relative.lt(0), lost = internal::dequantized(codes, true).lt(0).ne(is_negative);
    codes_ = torch::where(lost, torch::where(is_negative, codes - 1, codes + 1), codes).to(torch::kByte);
    squared_ = internal::nearest_codes(square.div(scales(squared_absmax_)), false);
    if (options.weight_decay() != 0) parameter_.mul_(1 - options.lr() * options.weight_decay());
    parameter_.add_(update.view(parameter_.sizes()).to(parameter_.scalar_type()));
  }
  const at::Tensor& parameter() const { return parameter_; }
  const at::Tensor& codes() const { return codes_; }
  const at::Tensor& squared() const { return squared_; }
  const at::Tensor& absmax() const { return absmax_; }
  const at::Tensor& squared_absmax() const { return squared_absmax_; }

 private:
  at::Tensor moment(const at::Tensor& codes, bool is_signed, const at::Tensor& absmax) const {
    return internal::dequantized(codes, is_signed).mul_(absmax.index_select(0, blocks_));
  }
  at::Tensor scales(const at::Tensor& absmax) const { return absmax.index_select(0, blocks_).clamp_min_(1e-38); }
  at::Tensor largest(const at::Tensor& values) const {
    return torch::zeros_like(absmax_).scatter_reduce_(0, blocks_, values, "amax");
  }

  at::Tensor parameter_, blocks_, codes_, squared_, absmax_, squared_absmax_;
  int64_t steps_ = 0;
};

bool same(const at::Tensor& a, const at::Tensor& b) { return torch::allclose(a, b, 0, 0, /*equal_nan=*/true); }

/// Gradients over many magnitudes, with zeros; at a late step with an infinity and NaN.
at::Tensor gradient_of(int step, const at::Tensor& parameter, const at::Generator& generator) {
  auto gradient = torch::randn(parameter.sizes(), generator) * torch::randn(parameter.sizes(), generator).mul_(4).exp();
  auto flat = gradient.view({-1});
  if (flat.numel() > 40) flat.narrow(0, 10, 20).zero_();
  if (flat.numel() > 600 && step == 7) flat[300] = std::numeric_limits<float>::infinity();
  if (flat.numel() > 600 && step == 8) flat[580] = std::numeric_limits<float>::quiet_NaN();
  return gradient.to(parameter.scalar_type());
}

TEST(EightBit, GivesTheNumbersOfTheOperators) {
  for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kBFloat16, torch::kHalf}) {
    for (const int64_t size : {1, 7, 255, 256, 257, 20000}) {
      SCOPED_TRACE(c10::str(dtype, " of ", size));
      const auto generator = generator_of(5);
      auto parameter = torch::randn({size}, generator).to(dtype).requires_grad_();
      const auto options = AdamW8bitOptions(0.01).weight_decay(size % 2 == 0 ? 0.1 : 0).min_8bit_size(1);
      AdamW8bit optimizer({parameter}, options);
      EightBitOfOperators expected(parameter);
      for (int step = 0; step < 10; ++step) {
        parameter.mutable_grad() = gradient_of(step, parameter, generator);
        optimizer.step();
        expected.step(parameter.grad(), options);
      }
      const auto& state = static_cast<const AdamW8bitParamState&>(*optimizer.state().at(parameter.unsafeGetTensorImpl()));
      EXPECT_TRUE(torch::equal(state.exp_avg(), expected.codes()));
      EXPECT_TRUE(torch::equal(state.exp_avg_sq(), expected.squared()));
      EXPECT_TRUE(same(state.exp_avg_absmax(), expected.absmax()));
      EXPECT_TRUE(same(state.exp_avg_sq_absmax(), expected.squared_absmax()));
      EXPECT_TRUE(same(parameter.detach(), expected.parameter()));
    }
  }
}

TEST(EightBit, KeepsTwoBytesAnElement) {
  constexpr int64_t kSize = 1 << 20;
  auto parameter = torch::zeros({kSize}).requires_grad_();
  AdamW8bit optimizer({parameter});
  parameter.mutable_grad() = torch::ones({kSize});
  optimizer.step();
  const auto& state = static_cast<const AdamW8bitParamState&>(*optimizer.state().at(parameter.unsafeGetTensorImpl()));
  size_t bytes = 0;
  for (const auto& each : {state.exp_avg(), state.exp_avg_sq(), state.exp_avg_absmax(), state.exp_avg_sq_absmax()})
    bytes += each.storage().nbytes();
  EXPECT_EQ(bytes, 2 * kSize + 8 * (kSize / 256));
}

} // namespace
} // namespace tessera::testing::eight_bit_test
