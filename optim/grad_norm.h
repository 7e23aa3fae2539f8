#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera {

/// The norm of all `tensors` together, over all ranks: the `norm_type`-norm of their norms (infinity, -infinity, or any number; 0
/// counts the tensors that are not zero everywhere, for one small all-reduce more a mesh). A tensor without dims, in float, or
/// double where one of the tensors is; zero for no tensors. Undefined tensors count as absent. Semantics:
/// torch.nn.utils.get_total_norm.
///
/// The tensors may lie on several meshes: one all-reduce of one number for each that shards some of them, in the order in which
/// the meshes first appear, the widest last. A mesh within the widest has tensors of its own: those that other ranks of the
/// widest have on theirs count beside them (experts), and each tensor counts once. What is the same on such meshes belongs on one
/// mesh, with a dim that replicates it. A plain tensor beside DTensors counts as the mean over the ranks of the widest mesh. So
/// the norm is the same on all of them. Every rank of the meshes calls it, with tensors on the same meshes, or on its own within
/// the widest. The host waits for the device only with `error_if_nonfinite`, an error on every rank where the norm is infinite or
/// NaN.
at::Tensor get_total_norm(const std::vector<at::Tensor>& tensors, double norm_type = 2.0, bool error_if_nonfinite = false);

/// Multiplies the gradients of `parameters` by `max_norm / total_norm`, where that is below 1, in place. Local. Parameters
/// without a gradient are left out, and one that is listed again, as LibTorch's `parameters()` lists a tied weight, counts once.
/// Semantics: torch.nn.utils.clip_grads_with_norm_.
// NOLINTNEXTLINE(readability-identifier-naming): PyTorch's name
void clip_grads_with_norm_(const std::vector<at::Tensor>& parameters, double max_norm, const at::Tensor& total_norm);

/// Both of the gradients of `parameters`, each of them once: returns the norm as it was. Semantics:
/// torch.nn.utils.clip_grad_norm_.
// NOLINTNEXTLINE(readability-identifier-naming): PyTorch's name
at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type = 2.0,
                           bool error_if_nonfinite = false);

} // namespace tessera
