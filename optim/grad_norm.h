#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera {

/// The norm of all `tensors` together, over all ranks: the `norm_type`-norm of their norms (infinity, -infinity, or any number; 0
/// counts the tensors that are not zero everywhere, for one small all-reduce more a mesh). A tensor without dims, in float, or
/// double where one of the tensors is; zero for no tensors. Undefined tensors count as absent. Semantics:
/// torch.nn.utils.get_total_norm.
///
/// The tensors may be on several meshes. Each mesh that shards some of them takes one all-reduce of one number, in the order in
/// which the meshes first appear, the largest mesh last. A smaller mesh (experts) holds tensors of its own. Those of the other
/// ranks' meshes are counted too, each once. Tensors that are the same on several such meshes belong on one mesh with a dim that
/// replicates them. A plain tensor among DTensors counts as the mean over the ranks of the largest mesh. So the norm is the same
/// on all ranks. Every rank of the meshes calls it, with tensors on the same meshes, or on its own mesh within the largest. With
/// `error_if_nonfinite` every rank throws if the norm is infinite or NaN. Only then the host waits for the device.
at::Tensor get_total_norm(const std::vector<at::Tensor>& tensors, double norm_type = 2.0, bool error_if_nonfinite = false);

/// Multiplies the gradients of `parameters` by `max_norm / total_norm`, where that is below 1, in place. Local. Parameters
/// without a gradient are left out, and one that is listed again, as LibTorch's `parameters()` lists a tied weight, counts once.
/// Semantics: torch.nn.utils.clip_grads_with_norm_.
// NOLINTNEXTLINE(readability-identifier-naming): PyTorch's name
void clip_grads_with_norm_(const std::vector<at::Tensor>& parameters, double max_norm, const at::Tensor& total_norm);

/// `get_total_norm` of the gradients of `parameters` (a tied one counted once), then `clip_grads_with_norm_`. Returns the norm
/// before clipping. Semantics: torch.nn.utils.clip_grad_norm_.
// NOLINTNEXTLINE(readability-identifier-naming): PyTorch's name
at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type = 2.0,
                           bool error_if_nonfinite = false);

} // namespace tessera
