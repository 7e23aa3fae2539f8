// Codes of numbers in blocks, against one number after another.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cfenv>
#include <cmath>
#include <limits>
#include <vector>

#include <tessera/mixed_precision/block_codec.h>
#include <tessera/mixed_precision/codecs/operator_codec.h>

#include <tessera/tests/support/matchers.h>

namespace tessera::testing::block_codec_test {
namespace {

using torch::Tensor;

constexpr auto kWires = {Wire::kInt8, Wire::kInt4, Wire::kFloat8, Wire::kSign};
const float kInfinity = std::numeric_limits<float>::infinity();

Tensor coded(const BlockCodec& codec, const Tensor& values, const Tensor& residual = {}) {
  const auto bytes = torch::full({codec.bytes(values.numel())}, 0xAB, torch::kByte);
  encode(codec, std::vector<CodedRange>{{0, values.numel(), 0}}, values, bytes, residual);
  return bytes;
}

Tensor decoded(const BlockCodec& codec, const Tensor& bytes, int64_t numel, torch::Dtype dtype = torch::kFloat) {
  auto values = torch::full({numel}, 3.25, dtype);
  decode(codec, std::vector<CodedRange>{{0, numel, 0}}, bytes, values);
  return values;
}

Tensor round_trip(const BlockCodec& codec, const Tensor& values) {
  return decoded(codec, coded(codec, values), values.numel(), values.scalar_type());
}

/// What one number of a block arrives as.
float reference(Wire wire, float value, float scale) {
  if (std::isnan(scale)) return scale;
  if (scale == 0) return 0;
  if (wire == Wire::kSign) return value >= 0 ? scale : -scale;
  if (wire == Wire::kFloat8) {
    const auto code = torch::tensor(std::clamp(value / scale, -448.0F, 448.0F)).to(torch::kFloat8_e4m3fn);
    return code.to(torch::kFloat).item<float>() * scale;
  }
  const float parts = wire == Wire::kInt8 ? 127 : 7;
  return std::nearbyint(std::clamp(value / scale, -parts, parts)) * scale;
}

float reference_scale(Wire wire, const std::vector<float>& block) {
  std::vector<float> sums(16, 0);
  float largest = 0;
  for (size_t i = 0; i < block.size(); ++i) {
    if (!std::isfinite(block[i])) return std::numeric_limits<float>::quiet_NaN();
    largest = std::max(largest, std::fabs(block[i]));
    sums[i % 16] += std::fabs(block[i]) * (1 / static_cast<float>(block.size()));
  }
  if (wire != Wire::kSign) return largest / (wire == Wire::kInt8 ? 127 : wire == Wire::kInt4 ? 7 : 448);
  float sum = 0;
  for (const float each : sums) sum += each;
  return sum;
}

Tensor reference_trip(const BlockCodec& codec, const Tensor& values) {
  const auto from = values.to(torch::kFloat).contiguous();
  auto to = torch::empty_like(from);
  for (int64_t begin = 0; begin < from.numel(); begin += codec.block) {
    const int64_t count = std::min(codec.block, from.numel() - begin);
    const float* const at = from.const_data_ptr<float>() + begin;
    const float scale = reference_scale(codec.wire, {at, at + count});
    for (int64_t i = 0; i < count; ++i) to.data_ptr<float>()[begin + i] = reference(codec.wire, at[i], scale);
  }
  return to.to(values.scalar_type());
}

bool same_bits(const Tensor& a, const Tensor& b) {
  return a.sizes() == b.sizes() && a.dtype() == b.dtype() && (a.eq(b) | (a.isnan() & b.isnan())).all().item<bool>();
}

std::vector<Tensor> inputs() {
  torch::manual_seed(3);
  auto mixed = torch::randn({1000}) * torch::exp(3 * torch::randn({1000}));
  auto with_nan = torch::randn({600}), with_infinity = torch::randn({600});
  with_nan[300] = NAN;
  with_infinity[599] = -kInfinity;
  return {torch::zeros({0}),
          torch::zeros({257}),
          torch::randn({1}),
          torch::randn({255}),
          torch::randn({256}),
          torch::randn({513}),
          mixed,
          with_nan,
          with_infinity,
          torch::full({300}, 3.4e38F),
          torch::full({9}, 1e-45F),
          torch::tensor({1e-38F, -3e-39F, 2e-45F}),
          torch::arange(-200, 200).to(torch::kFloat) / 8};
}

TEST(BlockCodec, IsThatOfOneNumberAfterAnother) {
  for (const auto wire : kWires) {
    for (const int64_t block : {8, 64, 256, 1024}) {
      for (const auto& values : inputs()) {
        for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf, torch::kDouble}) {
          const BlockCodec codec{wire, block};
          const auto given = values.to(dtype);
          EXPECT_TRUE(same_bits(round_trip(codec, given), reference_trip(codec, given)))
              << to_string(wire) << ", blocks of " << block << ", " << values.numel() << " numbers of " << dtype;
        }
      }
    }
  }
}

TEST(BlockCodec, IsThatOfOtherDevices) {
  for (const auto wire : kWires) {
    for (const auto& values : inputs()) {
      const BlockCodec codec{wire, 64};
      const std::vector<CodedRange> all{{0, values.numel(), 0}};
      auto residual = 0.1 * torch::randn(values.sizes()), other_residual = residual.clone();
      const auto bytes = coded(codec, values, residual), others = torch::zeros_like(bytes);
      internal::encode_by_operators(codec, all, values, others, other_residual);
      auto result = decoded(codec, bytes, values.numel()), other = torch::empty_like(result);
      internal::decode_by_operators(codec, all, others, other, DecodeInto::kWrite);
      if (wire == Wire::kSign) { // whose mean is summed in another order
        EXPECT_TRUE(torch::allclose(result, other, 1e-6, 0, true)) << values.numel();
        EXPECT_TRUE(torch::allclose(residual, other_residual, 1e-5, 1e-4, true)) << values.numel();
      } else {
        EXPECT_TRUE(same_bits(result, other)) << to_string(wire) << ' ' << values.numel();
        EXPECT_TRUE(same_bits(residual, other_residual)) << to_string(wire) << ' ' << values.numel();
      }
    }
  }
}

TEST(BlockCodec, HasTheErrorThatItSays) {
  for (const auto wire : {Wire::kInt8, Wire::kInt4, Wire::kFloat8}) {
    const BlockCodec codec{wire, 128};
    const auto values = torch::randn({128 * 50}) * torch::exp(torch::randn({128 * 50}));
    const auto error = (round_trip(codec, values) - values).abs().view({50, 128}).amax(1);
    const auto largest = values.abs().view({50, 128}).amax(1);
    EXPECT_LE((error / largest).max().item<double>(), codec.largest_error() * 1.0001) << to_string(wire);
    EXPECT_GE((error / largest).max().item<double>(), codec.largest_error() / 3) << to_string(wire);
  }
}

TEST(BlockCodec, RoundsTiesToTheEvenNumber) {
  const auto values = torch::tensor({127.0F, 0.5F, 1.5F, 2.5F, -0.5F, -1.5F, -127.0F});
  const auto expected = torch::tensor({127.0F, 0.0F, 2.0F, 2.0F, 0.0F, -2.0F, -127.0F});
  EXPECT_TRUE(torch::equal(round_trip({Wire::kInt8, 8}, values), expected));
}

TEST(BlockCodec, KnowsEveryFloat8) {
  const auto codes = torch::arange(0, 256).to(torch::kByte);
  const auto all = codes.view(torch::kFloat8_e4m3fn).to(torch::kFloat);
  const auto finite = all.masked_select(all.isfinite()); // two are NaN; the largest is 448, so that the scale is 1
  EXPECT_EQ(finite.numel(), 254);
  EXPECT_TRUE(torch::equal(round_trip({Wire::kFloat8, 256}, finite), finite));
  const auto between = torch::linspace(-448, 448, 100001);
  const auto rounded = between.to(torch::kFloat8_e4m3fn).to(torch::kFloat);
  for (int64_t at = 0; at < between.numel(); at += 200) {
    auto block = between.narrow(0, at, std::min<int64_t>(200, between.numel() - at));
    const auto result = round_trip({Wire::kFloat8, 256}, torch::cat({torch::tensor({448.0F}), block}));
    EXPECT_TRUE(torch::equal(result.slice(0, 1), rounded.narrow(0, at, block.numel()))) << at;
  }
}

TEST(BlockCodec, PoisonsTheBlockOfANumberThatIsNotFinite) {
  for (const auto wire : kWires) {
    for (const float bad : {NAN, kInfinity, -kInfinity}) {
      auto values = torch::randn({64});
      values[20] = bad;
      const auto result = round_trip({wire, 16}, values);
      EXPECT_TRUE(result.slice(0, 16, 32).isnan().all().item<bool>()) << to_string(wire);
      EXPECT_TRUE(result.slice(0, 0, 16).isfinite().all().item<bool>()) << to_string(wire);
      EXPECT_TRUE(result.slice(0, 32).isfinite().all().item<bool>()) << to_string(wire);
    }
  }
}

TEST(BlockCodec, KeepsWhatTheCodesLack) {
  for (const auto wire : kWires) {
    const BlockCodec codec{wire, 32};
    auto residual = torch::zeros({100}), sent = torch::zeros({100}, torch::kDouble), sum = torch::zeros({100}, torch::kDouble);
    for (int step = 0; step < 50; ++step) {
      const auto values = torch::randn({100}) + 0.01;
      sent += decoded(codec, coded(codec, values, residual), 100);
      sum += values;
    }
    EXPECT_TRUE(torch::allclose(sent + residual, sum, 1e-5, 1e-4)) << to_string(wire);
    EXPECT_LE(residual.abs().max().item<double>(), 40) << to_string(wire);
  }
}

TEST(BlockCodec, KeepsTheResidualOfABlockThatIsNotFinite) {
  auto residual = torch::rand({32});
  const auto before = residual.clone();
  auto values = torch::randn({32});
  values[3] = NAN;
  coded({Wire::kInt8, 16}, values, residual);
  EXPECT_TRUE(torch::equal(residual.slice(0, 0, 16), before.slice(0, 0, 16)));
  EXPECT_FALSE(torch::equal(residual.slice(0, 16), before.slice(0, 16)));
}

TEST(BlockCodec, CodesRangesByThemselves) {
  const BlockCodec codec{Wire::kInt4, 16};
  const auto values = torch::randn({200});
  const std::vector<CodedRange> ranges{{3, 50, 4}, {60, 0, 0}, {100, 77, 4 + codec.bytes(50)}};
  const auto bytes = torch::zeros({4 + codec.bytes(50) + codec.bytes(77)}, torch::kByte);
  encode(codec, ranges, values, bytes);
  auto result = torch::full({200}, 9.0);
  decode(codec, ranges, bytes, result);
  EXPECT_TRUE(torch::equal(result.slice(0, 3, 53), round_trip(codec, values.slice(0, 3, 53).clone())));
  EXPECT_TRUE(torch::equal(result.slice(0, 100, 177), round_trip(codec, values.slice(0, 100, 177).clone())));
  EXPECT_TRUE(result.slice(0, 0, 3).eq(9).all().item<bool>());
  EXPECT_TRUE(result.slice(0, 53, 100).eq(9).all().item<bool>());
  decode(codec, ranges, bytes, result, DecodeInto::kAdd);
  EXPECT_TRUE(torch::equal(result.slice(0, 3, 53), 2 * round_trip(codec, values.slice(0, 3, 53).clone())));
}

TEST(BlockCodec, SaysHowManyBytesItTakes) {
  EXPECT_EQ((BlockCodec{Wire::kInt8, 256}.bytes(1024)), 1024 + 16);
  EXPECT_EQ((BlockCodec{Wire::kInt4, 256}.bytes(1024)), 512 + 16);
  EXPECT_EQ((BlockCodec{Wire::kInt4, 256}.bytes(3)), 8);
  EXPECT_EQ((BlockCodec{Wire::kSign, 256}.bytes(1025)), 132 + 20);
  EXPECT_EQ((BlockCodec{Wire::kInt8, 256}.bytes(0)), 0);
}

TEST(BlockCodec, RefusesWhatItCannotCode) {
  const auto values = torch::randn({64});
  EXPECT_THROWS_WITH(coded({Wire::kInt8, 12}, values), "blocks of 12 numbers, but a block has a multiple of 8");
  EXPECT_THROWS_WITH(coded({Wire::kInt8, 0}, values), "blocks of 0 numbers");
  EXPECT_THROWS_WITH(coded({Wire::kInt8, 64}, torch::ones({8}, torch::kInt)), "numbers of Int have no codes");
  const auto bytes = torch::zeros({64}, torch::kByte);
  EXPECT_THROWS_WITH(encode({Wire::kInt8, 64}, std::vector<CodedRange>{{0, 64, 0}}, values, bytes),
                     "[0, 64) of 64 at byte 0 of 64");
  EXPECT_THROWS_WITH(encode({Wire::kInt8, 64}, std::vector<CodedRange>{{0, 8, 2}}, values, bytes), "at byte 2");
}

} // namespace
} // namespace tessera::testing::block_codec_test
