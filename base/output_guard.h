#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

namespace tessera::internal {

/// While it lives, operators write to `output` as transports do: autograd records nothing, whatever the mode of the caller, and
/// parameters and inference tensors can be written. An undefined tensor stands for no output.
class OutputGuard {
 public:
  explicit OutputGuard(const at::Tensor& output) : inference_(output.defined() && output.is_inference()) {}

 private:
  c10::InferenceMode inference_; // first: where it ends the mode, it turns autograd on
  at::NoGradGuard no_grad_;
};

} // namespace tessera::internal
