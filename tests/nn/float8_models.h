#pragma once

// What the codes of fp8 say, and a model whose Linears may multiply in them.

#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include <tessera/mesh/device_mesh.h>
#include <tessera/nn/float8_linear.h>

#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing::float8 {

inline constexpr auto kScalings = {Float8Scaling::kTensor, Float8Scaling::kRows};

/// The smallest power of two by which `largest` is at most `limit`.
inline double power_for(double largest, double limit) {
  if (!std::isfinite(largest)) return std::numeric_limits<double>::quiet_NaN();
  double power = std::exp2(-130);
  while (largest / power > limit) power *= 2;
  return power;
}

/// What the codes of a matrix say, of which the numbers along `dim`, or all, share a scale.
inline torch::Tensor rounded(const torch::Tensor& matrix, at::ScalarType dtype, Float8Scaling scaling, int64_t dim) {
  const double limit = dtype == torch::kFloat8_e5m2 ? 57344 : 448;
  const auto values = matrix.to(torch::kDouble);
  auto scale = scaling == Float8Scaling::kTensor ? values.abs().max().view({1, 1}) : values.abs().amax({dim}, true);
  scale = scale.contiguous().clone();
  for (int64_t i = 0; i < scale.numel(); ++i) {
    auto each = scale.view({-1})[i];
    each.fill_(power_for(each.item<double>(), limit));
  }
  return (values / scale).to(torch::kFloat).to(dtype).to(torch::kDouble) * scale;
}

inline void expect_close(const torch::Tensor& got, const torch::Tensor& want, const std::string& what) {
  ASSERT_TRUE(got.defined()) << what;
  const double unit = got.scalar_type() == torch::kBFloat16 ? 0.01 : got.scalar_type() == torch::kHalf ? 0.002 : 2e-6;
  const auto bound = unit * (want.numel() > 0 ? want.abs().max().item<double>() : 0);
  EXPECT_TENSORS_CLOSE(got.to(torch::kDouble), want, unit, bound) << what;
}

inline DeviceMesh line() { return init_device_mesh(torch::kCPU, {world_size()}, {"line"}); }

/// Two layers and a head.
struct MlpImpl : torch::nn::Module {
  MlpImpl()
      : up(register_module("up", torch::nn::Linear(16, 48))),
        down(register_module("down", torch::nn::Linear(torch::nn::LinearOptions(48, 16).bias(false)))),
        head(register_module("head", torch::nn::Linear(16, 3))) {}
  torch::Tensor hidden(const torch::Tensor& x) { return down(torch::gelu(up(x))); }
  torch::Tensor forward(const torch::Tensor& x) { return head(hidden(x)); }
  torch::nn::Linear up, down, head;
};
TORCH_MODULE(Mlp);

inline Mlp make_mlp() {
  torch::manual_seed(4);
  return Mlp();
}

inline torch::Tensor rows_of(int64_t rank) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(rank));
  return torch::randn({6, 16}, generator);
}

} // namespace tessera::testing::float8
