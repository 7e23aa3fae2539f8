#pragma once

// Internal: the gradient of a DTensor leaf lies as the leaf does.

#include <ATen/core/Tensor.h>

namespace tessera::internal::dispatch {

/// Adds, once, a hook to a DTensor leaf that requires grad: its gradient is redistributed to the leaf's placements (Replicate for
/// Partial) before it is accumulated. Not to one whose maker takes the gradient. Cheap for any other tensor.
void place_leaf_gradient(const at::Tensor& tensor);

} // namespace tessera::internal::dispatch
