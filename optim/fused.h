#pragma once

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

namespace tessera {

// LibTorch's optimizers, which take the same numbers of steps with PyTorch's fused kernels (torch.optim.AdamW(fused=True)): one
// pass over parameter, gradient and state in place of about ten. Options, groups, state and state dicts are those of LibTorch's
// classes: each loads what the other saved. They take DTensors (each rank its part, without communication) and plain tensors.
// Parameters of several dtypes and devices may be in one optimizer. One that is listed twice is stepped once. Errors: sparse and
// complex gradients.

class FusedAdam : public torch::optim::Adam {
 public:
  using Adam::Adam;
  at::Tensor step(LossClosure closure = nullptr) override;
};

class FusedAdamW : public torch::optim::AdamW {
 public:
  using AdamW::AdamW;
  at::Tensor step(LossClosure closure = nullptr) override;
};

class FusedSGD : public torch::optim::SGD {
 public:
  using SGD::SGD;
  at::Tensor step(LossClosure closure = nullptr) override;
};

class FusedAdagrad : public torch::optim::Adagrad {
 public:
  using Adagrad::Adagrad;
  at::Tensor step(LossClosure closure = nullptr) override;
};

} // namespace tessera
