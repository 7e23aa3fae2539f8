#pragma once

// Internal: the elements of a tensor that are stored.

#include <ATen/core/Tensor.h>

namespace tessera::internal {

/// The values of a sparse tensor, or the dense tensor itself.
inline at::Tensor stored_values(const at::Tensor& tensor) { return tensor.is_sparse() ? tensor._values() : tensor; }

/// The same, where an index that comes several times counts with the sum of its values.
inline at::Tensor summed_values(const at::Tensor& tensor) { return tensor.is_sparse() ? tensor.coalesce()._values() : tensor; }

} // namespace tessera::internal
