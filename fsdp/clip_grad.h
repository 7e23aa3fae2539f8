#pragma once

#include <torch/nn/module.h>

#include <tessera/optim/adaptive_clip.h>
#include <tessera/optim/grad_norm.h>

namespace tessera {

/// `clip_grad_norm_` (optim/grad_norm.h) of all parameters of `module`: scales their gradients so that the norm of all together,
/// over all ranks and meshes, is at most `max_norm`. Returns the norm before clipping. The host waits only when the norm is read.
/// Every rank of the meshes calls it.
///
/// If some parameters of a sharded model train but are neither sharded nor replicated, an error lists them, before any gradient
/// is scaled. Their gradients differ from rank to rank. Parameters of FullyShardOptions::ignored_params are ignored.
// NOLINTNEXTLINE(readability-identifier-naming): PyTorch's name
at::Tensor clip_grad_norm_(const torch::nn::Module& module, double max_norm, double norm_type = 2.0,
                           bool error_if_nonfinite = false);

/// torch::nn::utils::clip_grad_value_ of all parameters of `module`: limits each element of their gradients to
/// [-`clip_value`, `clip_value`]. Errors, and which ranks call it, as above; also for a complex parameter that takes a gradient.
// NOLINTNEXTLINE(readability-identifier-naming): PyTorch's name
void clip_grad_value_(const torch::nn::Module& module, double clip_value);

/// `clip_grad_adaptive_` (optim/adaptive_clip.h) of all parameters of `module`, by unit. Errors, and which ranks call it, as
/// above.
// NOLINTNEXTLINE(readability-identifier-naming): as clip_grad_norm_
void clip_grad_adaptive_(const torch::nn::Module& module, double clip_factor = 0.01, double eps = 1e-3);

} // namespace tessera
