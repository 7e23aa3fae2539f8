#include <tessera/fsdp/clip_grad.h>

#include <torch/nn/utils/clip_grad.h>

#include <string>

#include <tessera/fsdp/setup/trains_apart.h>
#include <tessera/optim/parts/backward_mark.h>

namespace tessera {

namespace {

std::string name_of(const torch::nn::Module& module, const at::Tensor& parameter) {
  for (const auto& item : module.named_parameters()) {
    if (item.value().is_same(parameter)) return item.key();
  }
  return "";
}

} // namespace

// NOLINTNEXTLINE(readability-identifier-naming)
at::Tensor clip_grad_norm_(const torch::nn::Module& module, double max_norm, double norm_type, bool error_if_nonfinite) {
  internal::check_none_trains_apart(module, "clip_grad_norm_", "clip them by themselves, as a list");
  return clip_grad_norm_(internal::parameters_not_ignored(module), max_norm, norm_type, error_if_nonfinite);
}

// NOLINTNEXTLINE(readability-identifier-naming)
void clip_grad_value_(const torch::nn::Module& module, double clip_value) {
  internal::check_none_trains_apart(module, "clip_grad_value_", "clip them by themselves, as a list");
  const auto parameters = internal::parameters_not_ignored(module);
  for (const auto& parameter : parameters) {
    TORCH_CHECK_NOT_IMPLEMENTED(!parameter.is_complex() || !parameter.requires_grad(), "clip_grad_value_: the parameter ",
                                name_of(module, parameter), " is ", parameter.scalar_type(),
                                ", and complex numbers have no order: ", "clip by the norm, with clip_grad_norm_");
  }
  internal::check_not_stepped_in_backward(parameters, "clip_grad_value_ takes gradients after a backward");
  torch::nn::utils::clip_grad_value_(parameters, clip_value);
}

// NOLINTNEXTLINE(readability-identifier-naming)
void clip_grad_adaptive_(const torch::nn::Module& module, double clip_factor, double eps) {
  internal::check_none_trains_apart(module, "clip_grad_adaptive_", "clip them by themselves, as a list");
  const auto parameters = internal::parameters_not_ignored(module);
  internal::check_not_stepped_in_backward(parameters, "clip_grad_adaptive_ takes gradients after a backward");
  clip_grad_adaptive_(parameters, clip_factor, eps);
}

} // namespace tessera
