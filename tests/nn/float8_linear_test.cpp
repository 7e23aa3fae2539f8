// Linears in fp8, against the same codes multiplied in double.
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/activations/recompute.h>
#include <tessera/dtensor/api.h>
#include <tessera/nn/float8_linear.h>

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <tessera/tests/nn/float8_models.h>
#include <tessera/tests/support/autocast.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing::float8_linear_test {
namespace {

using float8::expect_close;
using float8::kScalings;
using float8::line;
using float8::power_for;
using float8::rounded;
using torch::Tensor;

struct Reference {
  Tensor y, of_x, of_weight, of_bias;
};

Reference reference(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& gradient, Float8Scaling scaling) {
  const auto rows = x.reshape({-1, x.size(-1)}), g = gradient.reshape({-1, gradient.size(-1)});
  const auto e4m3 = torch::kFloat8_e4m3fn, e5m2 = torch::kFloat8_e5m2;
  Reference result;
  result.y = rounded(rows, e4m3, scaling, 1).mm(rounded(weight.t(), e4m3, scaling, 0));
  if (bias.defined()) result.y += bias.to(torch::kDouble);
  result.y = result.y.view(gradient.sizes());
  result.of_x = rounded(g, e5m2, scaling, 1).mm(rounded(weight, e4m3, scaling, 0)).view(x.sizes());
  result.of_weight = rounded(g.t(), e5m2, scaling, 1).mm(rounded(rows, e4m3, scaling, 0));
  result.of_bias = g.to(torch::kDouble).sum(0);
  return result;
}

Tensor leaf(const Tensor& tensor) { return tensor.detach().clone().requires_grad_(); }

TEST(Float8Linear, IsTheProductOfItsCodes) {
  torch::manual_seed(1);
  for (const auto scaling : kScalings) {
    for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kDouble, torch::kHalf}) {
      for (const auto& sizes : std::vector<std::vector<int64_t>>{{5, 6}, {2, 3, 6}, {6}, {1, 6}, {32, 6}}) {
        for (const bool has_bias : {false, true}) {
          SCOPED_TRACE(c10::str(c10::IntArrayRef(sizes), ' ', dtype, scaling == Float8Scaling::kRows ? ", rows" : ""));
          const auto x = leaf((torch::randn(sizes) * 30).to(dtype)), weight = leaf(torch::randn({7, 6}).to(dtype));
          const auto bias = has_bias ? leaf(torch::randn({7}).to(dtype)) : Tensor();
          const auto y = float8_linear(x, weight, bias, scaling);
          EXPECT_EQ(y.scalar_type(), dtype);
          const auto gradient = torch::randn(y.sizes()).to(dtype) * 1e-4;
          y.backward(gradient);
          const auto want = reference(x, weight, bias, gradient, scaling);
          expect_close(y, want.y, "result");
          expect_close(x.grad(), want.of_x, "gradient of the input");
          expect_close(weight.grad(), want.of_weight, "gradient of the weight");
          if (has_bias) expect_close(bias.grad(), want.of_bias, "gradient of the bias");
        }
      }
    }
  }
}

TEST(Float8Linear, IsPyTorchsScaledMm) {
  torch::manual_seed(2);
  const auto x = torch::randn({16, 32}), weight = torch::randn({48, 32});
  const auto scale_of = [](const Tensor& tensor) {
    return torch::full({}, power_for(tensor.abs().max().item<double>(), 448), torch::kFloat);
  };
  const auto x_scale = scale_of(x), w_scale = scale_of(weight);
  const auto want = at::_scaled_mm((x / x_scale).to(torch::kFloat8_e4m3fn), (weight / w_scale).to(torch::kFloat8_e4m3fn).t(),
                                   x_scale, w_scale, {}, {}, torch::kFloat);
  EXPECT_TENSORS_EQUAL(float8_linear(x, weight), want);
}

TEST(Float8Linear, SmallLargeAndNoNumbers) {
  const auto weight = torch::randn({4, 8});
  for (const auto scaling : kScalings) {
    EXPECT_TENSORS_EQUAL(float8_linear(torch::zeros({3, 8}), weight, {}, scaling), torch::zeros({3, 4}));
    EXPECT_TENSORS_EQUAL(float8_linear(torch::ones({3, 8}), torch::zeros({4, 8}), {}, scaling), torch::zeros({3, 4}));
    EXPECT_EQ(float8_linear(torch::ones({0, 8}), weight, {}, scaling).sizes(), (std::vector<int64_t>{0, 4}));
    EXPECT_EQ(float8_linear(torch::ones({3, 8}), torch::ones({0, 8}), {}, scaling).sizes(), (std::vector<int64_t>{3, 0}));
    EXPECT_TENSORS_EQUAL(float8_linear(torch::ones({3, 0}), torch::ones({4, 0}), torch::ones({4}), scaling), torch::ones({3, 4}));
    for (const double size : {1e-12, 1e12}) {
      const auto x = torch::randn({3, 8}) * size;
      expect_close(float8_linear(x, weight, {}, scaling), reference(x, weight, {}, torch::ones({3, 4}), scaling).y, "result");
    }
  }
}

TEST(Float8Linear, ANumberThatIsNotFiniteSpoilsWhatSharesItsScale) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    auto x = torch::ones({3, 8});
    x[1][2] = bad;
    const auto weight = leaf(torch::ones({4, 8}));
    EXPECT_TRUE(float8_linear(x, weight).isnan().all().item<bool>());
    const auto by_rows = float8_linear(x, weight, {}, Float8Scaling::kRows);
    EXPECT_TRUE(by_rows[1].isnan().all().item<bool>());
    EXPECT_TENSORS_EQUAL(by_rows[0].detach(), torch::full({4}, 8.f));
    auto gradient = torch::ones({3, 4});
    gradient[0][0] = bad;
    float8_linear(torch::ones({3, 8}), weight).backward(gradient);
    EXPECT_TRUE(weight.grad().isnan().all().item<bool>());
  }
}

/// How often operators of a name run on this thread while it lives.
class Calls {
 public:
  explicit Calls(const char* name) {
    counted = name;
    calls = 0;
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback([](const at::RecordFunction& call) {
      if (counted == call.name()) ++calls;
      return std::unique_ptr<at::ObserverContext>();
    }));
  }
  ~Calls() { at::removeCallback(handle_); }
  Calls(const Calls&) = delete;
  Calls& operator=(const Calls&) = delete;
  int64_t count() const { return calls; }

 private:
  static thread_local std::string counted;
  static thread_local int64_t calls;
  at::CallbackHandle handle_;
};
thread_local std::string Calls::counted;
thread_local int64_t Calls::calls = 0;

TEST(Float8Linear, EncodesAGradientOnceWhereItHasOneScale) {
  for (const auto scaling : kScalings) {
    const auto x = torch::ones({3, 8}, torch::kBFloat16).requires_grad_(), weight = leaf(torch::ones({4, 8}, torch::kBFloat16));
    const auto y = float8_linear(x, weight, {}, scaling).sum();
    const Calls largest("aten::linalg_vector_norm");
    y.backward();
    EXPECT_EQ(largest.count(), scaling == Float8Scaling::kTensor ? 3 : 4);
  }
}

TEST(Float8Linear, IsNotMultipliedAgainAtTheEndOfARecomputation) {
  const auto x = torch::ones({3, 8}).requires_grad_(), weight = leaf(torch::ones({4, 8}));
  const Calls products("aten::_scaled_mm");
  const auto y = recompute([&](const Tensor& input) { return float8_linear(input * 2, weight); }, x);
  y.sum().backward();
  EXPECT_EQ(products.count(), 3) << "of the result and of two gradients";
  EXPECT_TENSORS_EQUAL(x.grad(), torch::full({3, 8}, 8.f));
}

TEST(Float8Linear, HasShapesOnMeta) {
  const auto meta = torch::TensorOptions(torch::kMeta).dtype(torch::kBFloat16);
  for (const auto scaling : kScalings) {
    const auto x = torch::empty({2, 3, 8}, meta).requires_grad_(), weight = torch::empty({4, 8}, meta).requires_grad_();
    const auto y = float8_linear(x, weight, {}, scaling);
    EXPECT_EQ(y.sizes(), (std::vector<int64_t>{2, 3, 4}));
    EXPECT_EQ(y.dtype(), torch::kBFloat16);
    y.sum().backward();
    EXPECT_EQ(weight.grad().sizes(), weight.sizes());
  }
}

TEST(Float8Linear, RefusesWhatItCannotMultiply) {
  const auto x = torch::ones({3, 8}), weight = torch::ones({4, 8});
  EXPECT_THROWS_WITH(float8_linear(torch::ones({3, 8}, torch::kLong), weight), "the input is of Long");
  EXPECT_THROWS_WITH(float8_linear(x, weight.to(torch::kBFloat16)), "the input is of Float, the weight of BFloat16");
  EXPECT_THROWS_WITH(float8_linear(x, torch::ones({4, 7})), "the input has the shape [3, 8]");
  EXPECT_THROWS_WITH(float8_linear(x, torch::ones({8})), "the weight has the shape [8], not [out, in]");
  EXPECT_THROWS_WITH(float8_linear(torch::ones({}), weight), "the input has the shape []");
  EXPECT_THROWS_WITH(float8_linear(x, weight, torch::ones({3})), "the bias has the shape [3], not [4]");
  const auto trained = leaf(weight);
  const auto y = float8_linear(x, trained).sum();
  EXPECT_THROWS_WITH(torch::autograd::grad({y}, {trained}, {}, true, /*create_graph=*/true), "has no second derivative");
}

TEST(Float8Linear, AutocastCastsItsArguments) {
  const auto x = torch::randn({3, 8}), weight = torch::randn({4, 8}), bias = torch::randn({4});
  const auto half = torch::kBFloat16;
  const auto want = float8_linear(x.to(half), weight.to(half), bias.to(half));
  const AutocastScope autocast(torch::kCPU);
  EXPECT_TENSORS_EQUAL(float8_linear(x, weight, bias), want);
}

/// The same numbers as of whole tensors: the largest number is that of all ranks.
TEST(Float8Linear, OfDTensorsIsThatOfWholeTensors) {
  const auto mesh = line();
  torch::manual_seed(3);
  const auto x = torch::randn({4, 6, 8}), weight = torch::randn({12, 8}), gradient = torch::randn({4, 6, 12});
  const std::vector<Placement> of_x{Replicate{}, Shard{0}, Shard{1}, Shard{2}}, of_weight{Replicate{}, Shard{0}, Shard{1}};
  for (const auto scaling : kScalings) {
    const auto want = reference(x, weight, {}, gradient, scaling);
    for (const auto& x_placement : of_x) {
      for (const auto& w_placement : of_weight) {
        SCOPED_TRACE(c10::str(to_string(x_placement), " by ", to_string(w_placement)));
        const auto split_x = leaf(distribute_tensor(x, mesh, {x_placement}));
        const auto split_weight = leaf(distribute_tensor(weight, mesh, {w_placement}));
        const auto y = float8_linear(split_x, split_weight, {}, scaling);
        y.backward(distribute_tensor(gradient, mesh, {Replicate{}}));
        expect_close(DTensor(y).full_tensor().detach(), want.y, "result");
        expect_close(DTensor(split_x.grad()).full_tensor(), want.of_x, "gradient of the input");
        expect_close(DTensor(split_weight.grad()).full_tensor(), want.of_weight, "gradient of the weight");
      }
    }
  }
}

/// Terms of `sum` that are far larger than it.
Tensor in_large_terms(const Tensor& sum, const DeviceMesh& mesh) {
  const bool is_first = world_rank() == 0;
  return from_local(is_first ? sum * 512.0 : sum * (-511.0 / (world_size() - 1)), mesh, {Partial{}});
}

TEST(Float8Linear, OfTermsIsThatOfTheirSum) {
  if (world_size() == 1) GTEST_SKIP() << "the terms are those of several ranks";
  const auto mesh = line();
  torch::manual_seed(3);
  const auto x = torch::randn({4, 6, 8}), weight = torch::randn({12, 8}), gradient = torch::randn({4, 6, 12});
  for (const auto scaling : kScalings) {
    for (const bool of_input : {false, true}) {
      SCOPED_TRACE(of_input);
      const auto input = leaf(of_input ? in_large_terms(x, mesh) : distribute_tensor(x, mesh, {Replicate{}}));
      const auto matrix = leaf(distribute_tensor(weight, mesh, {Replicate{}}));
      const auto seed = in_large_terms(gradient, mesh);
      const auto want =
          reference(of_input ? DTensor(input.detach()).full_tensor() : x, weight, {}, DTensor(seed).full_tensor(), scaling);
      const auto y = float8_linear(input, matrix, {}, scaling);
      y.backward(seed);
      expect_close(DTensor(y).full_tensor().detach(), want.y, "result");
      expect_close(DTensor(input.grad()).full_tensor(), want.of_x, "gradient of the input");
      expect_close(DTensor(matrix.grad()).full_tensor(), want.of_weight, "gradient of the weight");
    }
  }
}

} // namespace
} // namespace tessera::testing::float8_linear_test
