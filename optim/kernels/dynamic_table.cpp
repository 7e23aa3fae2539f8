#include <tessera/optim/kernels/dynamic_table.h>

#include <ATen/ops/bucketize.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace tessera::internal {

namespace {

constexpr int kExponents = 7;

struct Tables {
  at::Tensor values;  ///< [256]
  at::Tensor borders; ///< [255], between one value and the next
};

const Tables& tables(bool is_signed) {
  static const std::array<Tables, 2> both = [] {
    std::array<Tables, 2> made;
    for (const bool with_sign : {false, true}) {
      const auto values = at::tensor(dynamic_table(with_sign), at::kFloat);
      made[with_sign ? 1 : 0] = {values, values.narrow(0, 1, 255).add(values.narrow(0, 0, 255)).mul_(0.5)};
    }
    return made;
  }();
  return both[is_signed ? 1 : 0];
}

} // namespace

std::vector<float> dynamic_table(bool is_signed) {
  std::vector<float> values{0, 1};
  for (int exponent = 0; exponent < kExponents; ++exponent) {
    const int fractions = 1 << (is_signed ? exponent : exponent + 1);
    // These are the operators that bitsandbytes takes: the values are its own to the bit.
    const auto borders = at::linspace(0.1, 1, fractions + 1, at::kFloat);
    const auto middles = borders.narrow(0, 0, fractions).add(borders.narrow(0, 1, fractions)).div_(2);
    const auto scaled = middles.mul_(std::pow(10.0, exponent - (kExponents - 1)));
    for (int i = 0; i < fractions; ++i) {
      const float value = scaled.const_data_ptr<float>()[i];
      values.push_back(value);
      if (is_signed) values.push_back(-value);
    }
  }
  std::sort(values.begin(), values.end());
  return values;
}

at::Tensor dequantized(const at::Tensor& codes, bool is_signed) {
  const auto values = tables(is_signed).values.to(codes.device());
  return values.index_select(0, codes.reshape({-1}).to(at::kInt)).view(codes.sizes());
}

at::Tensor nearest_codes(const at::Tensor& values, bool is_signed) {
  return at::bucketize(values, tables(is_signed).borders.to(values.device()), /*out_int32=*/true).to(at::kByte);
}

} // namespace tessera::internal
