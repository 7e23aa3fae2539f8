#pragma once

// Internal: activations at the borders of a layer.

#include <ATen/core/Tensor.h>

#include <string>

#include <tessera/dtensor/placement.h>

namespace tessera::internal::parallel {

/// `placement` with its dim counted from the first of `ndim`.
Placement at_dim(Placement placement, int64_t ndim);

/// `x`, a DTensor of a 1-D mesh, under `wanted`. Where a gradient is to come this is a node of its own, also where nothing moves:
/// the gradients of all that read `x` one after another go through one node, so that autograd sums them before the one reduction,
/// and what was moved for the first reader serves the others. `label` names the reader in errors.
at::Tensor entered(const at::Tensor& x, const Placement& wanted, const std::string& label);

/// Lets go of what was moved for the last reader.
void forget_entered();

/// `result`, a DTensor of a 1-D mesh, under `wanted`.
at::Tensor left(const at::Tensor& result, const Placement& wanted, const std::string& label);

} // namespace tessera::internal::parallel
