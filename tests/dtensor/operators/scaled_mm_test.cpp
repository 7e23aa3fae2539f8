// Products in fp8 of DTensors, against products in double.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/dtensor/api.h>
#include <tessera/dtensor/debug.h>
#include <tessera/dtensor/operators/scaled_mm.h>

#include <array>
#include <cmath>
#include <string>
#include <vector>

#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing::scaled_mm_test {
namespace {

using torch::Tensor;

DeviceMesh line_mesh() { return init_device_mesh(torch::kCPU, {world_size()}, {"line"}); }

/// Whole numbers, which fp8 has exactly, as are the sums of their products in fp32.
Tensor codes(int64_t rows, int64_t columns, torch::Dtype dtype) {
  return torch::arange(rows * columns).mul(5).remainder(7).sub(3).view({rows, columns}).to(torch::kFloat).to(dtype);
}

/// Powers of two: of one element, or of a row's each.
Tensor scales(const std::vector<int64_t>& sizes) {
  const auto numel = c10::multiply_integers(sizes);
  return torch::exp2(torch::arange(numel).remainder(4).sub(1).to(torch::kFloat)).view(sizes);
}

struct Product {
  Tensor a, b, a_scale, b_scale, bias;
  at::ScalarType dtype = torch::kFloat;

  Tensor in_double() const {
    auto result = (a.to(torch::kDouble) * a_scale.to(torch::kDouble)).mm(b.to(torch::kDouble) * b_scale.to(torch::kDouble));
    if (bias.defined()) result += bias.to(torch::kDouble);
    return result.to(dtype);
  }
  Tensor run() const {
    return at::_scaled_mm(a, b, a_scale, b_scale, bias.defined() ? std::optional(bias) : std::nullopt, {}, dtype);
  }
};

struct Scales {
  std::string name;
  std::vector<int64_t> a, b;
};

std::vector<Scales> scales_of(int64_t m, int64_t n) {
  return {{"whole", {}, {}}, {"[1, 1]", {1, 1}, {1, 1}}, {"rows", {m, 1}, {1, n}}, {"rows of a", {m, 1}, {}}};
}

Product make_product(int64_t m, int64_t k, int64_t n, const Scales& of, bool has_bias, at::ScalarType dtype) {
  return {codes(m, k, torch::kFloat8_e4m3fn),
          codes(n, k, torch::kFloat8_e5m2).t(),
          scales(of.a),
          scales(of.b),
          has_bias ? torch::arange(n).to(dtype) : Tensor(),
          dtype};
}

Tensor whole(const Tensor& tensor) { return is_dtensor(tensor) ? DTensor(tensor).full_tensor() : tensor; }

const std::vector<Placement> kPlacements{Replicate{}, Shard{0}, Shard{1}};

/// Checks every pair of placements of the matrices, and scales of rows that lie as the rows do, or whole.
void expect_product(const Product& plain, const DeviceMesh& mesh) {
  const auto expected = plain.in_double();
  for (const auto& a : kPlacements) {
    for (const auto& b : kPlacements) {
      for (const bool splits_scales : {false, true}) {
        if (splits_scales && plain.a_scale.numel() == 1) continue;
        SCOPED_TRACE(c10::str(to_string(a), " by ", to_string(b), splits_scales ? ", scales split" : ""));
        const auto scale_at = [&](const Tensor& scale, int64_t dim) {
          return distribute_tensor(scale, mesh, {splits_scales && scale.numel() > 1 ? Placement(Shard{dim}) : Replicate{}});
        };
        const Product split{distribute_tensor(plain.a, mesh, {a}),
                            distribute_tensor(plain.b, mesh, {b}),
                            scale_at(plain.a_scale, 0),
                            scale_at(plain.b_scale, 1),
                            plain.bias.defined() ? distribute_tensor(plain.bias, mesh, {Replicate{}}) : Tensor(),
                            plain.dtype};
        const auto result = split.run();
        EXPECT_EQ(result.scalar_type(), plain.dtype);
        const double unit = plain.dtype == torch::kBFloat16 ? 0.01 : 0; // of sums of rounded sums
        EXPECT_TENSORS_CLOSE(whole(result), expected, unit, unit * expected.abs().max().item<double>());
      }
    }
  }
}

TEST(ScaledMm, IsTheProductUnderAllPlacements) {
  const auto mesh = line_mesh();
  for (const auto& [m, k, n] : std::vector<std::array<int64_t, 3>>{{5, 6, 7}, {1, 3, 2}, {16, 32, 16}}) {
    for (const auto& of : scales_of(m, n)) {
      for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
        for (const bool has_bias : {false, true}) {
          SCOPED_TRACE(c10::str(m, " x ", k, " x ", n, ", scales ", of.name, ", ", dtype, has_bias ? ", bias" : ""));
          expect_product(make_product(m, k, n, of, has_bias, dtype), mesh);
        }
      }
    }
  }
}

TEST(ScaledMm, SumsOverTheRanksWhereTheSumIsSplit) {
  const auto mesh = line_mesh();
  const auto plain = make_product(4, 24, 3, scales_of(4, 3)[2], true, torch::kFloat);
  auto split = plain;
  split.a = distribute_tensor(plain.a, mesh, {Shard{1}});
  split.b = distribute_tensor(plain.b, mesh, {Shard{0}});
  for (auto* tensor : {&split.a_scale, &split.b_scale, &split.bias}) *tensor = distribute_tensor(*tensor, mesh, {Replicate{}});
  const CountCollectives count;
  const DTensor result(split.run());
  EXPECT_EQ(count.total_calls(), 0);
  if (mesh.size() > 1) {
    EXPECT_TRUE(is_partial(result.placements()[0])) << to_string(result.placements());
  }
  EXPECT_TENSORS_EQUAL(result.full_tensor(), plain.in_double());
}

TEST(ScaledMm, TakesTheLargestOfAPartialScale) {
  const auto mesh = line_mesh();
  auto plain = make_product(4, 8, 3, scales_of(4, 3)[0], false, torch::kFloat);
  const auto own = torch::full({}, std::exp2(static_cast<float>(world_rank())));
  plain.a_scale = torch::full({}, std::exp2(static_cast<float>(world_size() - 1)));
  auto split = plain;
  split.a = distribute_tensor(plain.a, mesh, {Shard{0}});
  split.b = distribute_tensor(plain.b, mesh, {Replicate{}});
  split.b_scale = distribute_tensor(plain.b_scale, mesh, {Replicate{}});
  split.a_scale = from_local(own, mesh, {Partial{Partial::Op::kMax}});
  EXPECT_TENSORS_EQUAL(whole(split.run()), plain.in_double());
}

TEST(ScaledMm, AResultInFloat8IsNoSum) {
  const auto mesh = line_mesh();
  auto plain = make_product(4, 8, 3, scales_of(4, 3)[0], false, torch::kFloat8_e4m3fn);
  plain.a = plain.a.to(torch::kFloat).clamp(-1, 1).to(torch::kFloat8_e4m3fn);
  const auto expected = plain.run();
  for (auto* tensor : {&plain.a_scale, &plain.b_scale}) *tensor = distribute_tensor(*tensor, mesh, {Replicate{}});
  plain.a = distribute_tensor(plain.a, mesh, {Shard{1}});
  plain.b = distribute_tensor(plain.b, mesh, {Shard{0}});
  const DTensor result(plain.run());
  EXPECT_FALSE(is_partial(result.placements()[0]));
  EXPECT_TENSORS_EQUAL(result.full_tensor().to(torch::kFloat), expected.to(torch::kFloat));
}

TEST(ScaledMm, PadsWhatGpusWantInMultiplesOf16) {
  for (const auto& [m, k, n] : std::vector<std::array<int64_t, 3>>{{5, 6, 7}, {16, 17, 31}, {16, 32, 16}}) {
    const auto plain = make_product(m, k, n, scales_of(m, n)[0], true, torch::kFloat);
    const auto result = internal::aligned_scaled_mm(
        {.a = plain.a, .b = plain.b, .a_scale = plain.a_scale, .b_scale = plain.b_scale, .bias = plain.bias});
    EXPECT_TENSORS_EQUAL(result, plain.in_double());
  }
}

TEST(ScaledMm, WhatIsEmpty) {
  for (const auto& [m, k, n] : std::vector<std::array<int64_t, 3>>{{0, 6, 7}, {5, 0, 7}, {5, 6, 0}}) {
    for (const auto& of : scales_of(m, n)) {
      SCOPED_TRACE(c10::str(m, " x ", k, " x ", n, ", scales ", of.name));
      const auto plain = make_product(m, k, n, of, true, torch::kFloat);
      const auto result = internal::scaled_mm(
          {.a = plain.a, .b = plain.b, .a_scale = plain.a_scale, .b_scale = plain.b_scale, .bias = plain.bias});
      EXPECT_TENSORS_EQUAL(result, plain.in_double());
    }
  }
}

TEST(ScaledMm, RefusesWhatDoesNotFit) {
  const auto mesh = line_mesh();
  auto product = make_product(4, 8, 3, scales_of(4, 3)[2], true, torch::kFloat);
  for (auto* tensor : {&product.a, &product.b, &product.a_scale, &product.b_scale, &product.bias})
    *tensor = distribute_tensor(*tensor, mesh, {Replicate{}});
  auto wrong = product;
  wrong.a_scale = distribute_tensor(torch::ones({3, 1}), mesh, {Replicate{}});
  EXPECT_THROWS_WITH(wrong.run(), "have one element, or the shapes [4, 1] and [1, 3], not [3, 1] and [1, 3]");
  wrong = product;
  wrong.bias = distribute_tensor(torch::ones({4}), mesh, {Replicate{}});
  EXPECT_THROWS_WITH(wrong.run(), "the bias has the shape [4], not [3]");
  wrong = product;
  wrong.b = distribute_tensor(codes(3, 3, torch::kFloat8_e5m2), mesh, {Replicate{}});
  EXPECT_THROWS_WITH(wrong.run(), "the shapes [4, 8] and [3, 3] are not those of matrices [m, k] and [k, n]");
  wrong = product;
  wrong.dtype = torch::kFloat8_e4m3fn;
  EXPECT_THROWS_WITH(wrong.run(), "a result in Float8_e4m3fn needs scales of one element");
}

} // namespace
} // namespace tessera::testing::scaled_mm_test
