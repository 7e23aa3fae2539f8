#pragma once

#include <tessera/tests/fsdp/equivalence/compare_training.h>

namespace tessera::testing {

/// Two layers and a head, each a group. The second one's odd width makes uneven shards.
struct Layers : CaseModel {
  Layers()
      : a(register_module("a", torch::nn::Linear(kWidth, 8))),
        b(register_module("b", torch::nn::Linear(8, 5))),
        head(register_module("head", torch::nn::Linear(5, 1))) {}
  torch::Tensor hidden(const torch::Tensor& x) { return torch::gelu(b(a(x).tanh())); }
  torch::Tensor loss(const torch::Tensor& x) override { return head(hidden(x)).square().mean(); }
  torch::nn::Linear a, b, head;
};

} // namespace tessera::testing
