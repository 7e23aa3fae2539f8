#pragma once

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cstdint>

namespace tessera {

// LibTorch's optimizers, which take the same numbers of steps with PyTorch's fused kernels (torch.optim.AdamW(fused=True)): one
// pass over parameter, gradient and state in place of about ten. Options, groups, state and state dicts are those of LibTorch's
// classes: each loads what the other saved. They take DTensors (each rank its part, without communication) and plain tensors.
// Parameters of several dtypes and devices may be in one optimizer. One that is listed twice is stepped once. Errors: sparse and
// complex gradients.

/// What FusedAdam and FusedAdamW keep moments in.
enum class MomentDtype {
  kAsParameter,
  /// bf16, 4 bytes a parameter in place of 8. A moment is rounded to one of the two values beside it, to each with the
  /// probability that keeps the mean, so that small gradients are not lost; the step itself takes it unrounded. The random
  /// numbers are a hash of a seed, the number of the step and the element's place in its parameter: the same on any mesh, and
  /// after a resume. On the CPU alone, and without amsgrad.
  kBFloat16,
};

class FusedAdam : public torch::optim::Adam {
 public:
  using Adam::Adam;
  at::Tensor step(LossClosure closure = nullptr) override;
  /// Call it before the first step and, with the same seed, before a resume goes on. Moments of before are rounded in the next
  /// step. A step whose moments are in bf16 is an error without it.
  void keep_moments_in(MomentDtype dtype, uint64_t seed = 0);

 private:
  MomentDtype moments_ = MomentDtype::kAsParameter;
  uint64_t seed_ = 0;
};

class FusedAdamW : public torch::optim::AdamW {
 public:
  using AdamW::AdamW;
  at::Tensor step(LossClosure closure = nullptr) override;
  /// Does what that of FusedAdam does.
  void keep_moments_in(MomentDtype dtype, uint64_t seed = 0);

 private:
  MomentDtype moments_ = MomentDtype::kAsParameter;
  uint64_t seed_ = 0;
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
