#pragma once

// A small module whose calls save tensors, and its gradients.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <vector>

namespace tessera::testing {

/// Norm, two layers and dropout: saves inputs, outputs and masks.
struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(int64_t width = 6, double dropout = 0.0)
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        up(register_module("up", torch::nn::Linear(width, 2 * width))),
        down(register_module("down", torch::nn::Linear(2 * width, width))),
        drop(register_module("drop", torch::nn::Dropout(dropout))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    ++runs;
    return x + drop(down(torch::gelu(up(norm(x)))));
  }
  int runs = 0;
  torch::nn::LayerNorm norm;
  torch::nn::Linear up, down;
  torch::nn::Dropout drop;
};
TORCH_MODULE(Mlp);

inline Mlp make_mlp(double dropout = 0.0) {
  torch::manual_seed(1);
  return Mlp(6, dropout);
}

inline torch::Tensor input(bool requires_grad = true) {
  auto generator = at::detail::createCPUGenerator(7);
  return torch::randn({4, 6}, generator).requires_grad_(requires_grad);
}

/// The gradients of all parameters and of `x`, which are reset.
inline std::vector<torch::Tensor> gradients_of(torch::nn::Module& module, const torch::Tensor& x) {
  std::vector<torch::Tensor> all;
  auto tensors = module.parameters();
  tensors.push_back(x);
  for (auto& each : tensors) {
    all.push_back(each.grad().defined() ? each.grad().clone() : torch::Tensor());
    each.mutable_grad() = torch::Tensor();
  }
  return all;
}

inline void expect_same(const std::vector<torch::Tensor>& got, const std::vector<torch::Tensor>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].defined(), expected[i].defined()) << i;
    if (got[i].defined()) EXPECT_TRUE(torch::equal(got[i], expected[i])) << i;
  }
}

} // namespace tessera::testing
