#pragma once

#include <torch/nn/module.h>

#include <tessera/optim/grad_norm.h>

namespace tessera {

/// `clip_grad_norm_` (optim/grad_norm.h) of all parameters of `module`: scales their gradients so that the norm of all together,
/// over all ranks and meshes, is at most `max_norm`, and returns the norm as it was, which waits for nothing until it is read.
/// Every rank of the meshes calls it.
///
/// This one knows the names: parameters that train and that nothing sharded or replicated, beside others that are, are an error
/// that lists them, before any gradient is scaled. Their gradients differ from rank to rank. Those of
/// FullyShardOptions::ignored_params are passed over.
// NOLINTNEXTLINE(readability-identifier-naming): PyTorch's name
at::Tensor clip_grad_norm_(const torch::nn::Module& module, double max_norm, double norm_type = 2.0,
                           bool error_if_nonfinite = false);

/// torch::nn::utils::clip_grad_value_ of all parameters of `module`: limits each element of their gradients to
/// [-`clip_value`, `clip_value`]. Errors, and which ranks call it, as above.
// NOLINTNEXTLINE(readability-identifier-naming): PyTorch's name
void clip_grad_value_(const torch::nn::Module& module, double clip_value);

} // namespace tessera
