#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera {

/// Adaptive gradient clipping (Brock et al., "High-Performance Large-Scale Image Recognition Without Normalization", 2021):
/// limits the gradient of each unit of a parameter to `clip_factor` times the unit's own norm, in place. A unit is a row along
/// dim 0 (the weights into one output of a linear layer or a convolution); a parameter with one dim or none is one unit. A unit
/// whose norm is below `eps` counts as one of `eps`. (The paper leaves out the last linear layer: list the other parameters.)
///
/// The parameters and gradients may be DTensors of any placements: the squared norms of all units are added up over the ranks by
/// one all-reduce for each mesh dim that splits some of them, of 16 bytes a unit. Every rank of the meshes calls it, with
/// gradients for the same parameters. Those without a gradient are left out, and one that is listed again counts once. It needs
/// no gradients of other parameters: `StepInBackwardOptions::before_step` may call it.
///
/// Errors: a `clip_factor` or `eps` that is not positive; a gradient that is sparse or complex, or that waits for its reduction.
// NOLINTNEXTLINE(readability-identifier-naming): as clip_grad_norm_
void clip_grad_adaptive_(const std::vector<at::Tensor>& parameters, double clip_factor = 0.01, double eps = 1e-3);

} // namespace tessera
