#include <tessera/fsdp/clip_grad.h>

#include <torch/nn/utils/clip_grad.h>

#include <tessera/fsdp/trains_apart.h>

namespace tessera {

// NOLINTNEXTLINE(readability-identifier-naming)
at::Tensor clip_grad_norm_(const torch::nn::Module& module, double max_norm, double norm_type, bool error_if_nonfinite) {
  internal::check_none_trains_apart(module, "clip_grad_norm_", "clip them by themselves, as a list");
  return clip_grad_norm_(internal::parameters_not_ignored(module), max_norm, norm_type, error_if_nonfinite);
}

// NOLINTNEXTLINE(readability-identifier-naming)
void clip_grad_value_(const torch::nn::Module& module, double clip_value) {
  internal::check_none_trains_apart(module, "clip_grad_value_", "clip them by themselves, as a list");
  torch::nn::utils::clip_grad_value_(internal::parameters_not_ignored(module), clip_value);
}

} // namespace tessera
