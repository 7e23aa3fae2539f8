#pragma once

// Internal: gradients of whole parameters that are sums over the ranks, as those of norms and biases are where the sequence is
// split.

#include <ATen/core/Tensor.h>

namespace tessera::internal::parallel {

/// Has the gradient of `parameter`, a leaf with a style, lie as the parameter does. A sum over the ranks waits for the others of
/// its backward: one all-reduce at the end serves them all. It does not wait where somebody may look at it before: a hook of the
/// program's, `autograd::grad`, a backward with create_graph.
void place_gradient_late(const at::Tensor& parameter);

} // namespace tessera::internal::parallel
