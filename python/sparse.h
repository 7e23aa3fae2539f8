#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/collectives/communicator.h>

namespace tessera::python {

/// Replaces `tensor`, in COO format, by the sum over the ranks, coalesced. Every rank calls it, with tensors of equal shapes,
/// dtypes and numbers of sparse dims, and any number of values: others are an error on all ranks, before any values are sent.
/// Blocks.
void add_up_sparse(Communicator& group, const at::Tensor& tensor);

} // namespace tessera::python
