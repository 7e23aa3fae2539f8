#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/collectives/communicator.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <cstdint>
#include <vector>

#include "staging.h"

namespace tessera::python {

/// The list with a tensor for each rank of `group`, of which this rank's is as large as `own`. They have its dtype, and may
/// differ in size.
const Tensors& parts_of(const std::vector<Tensors>& lists, const Communicator& group, const at::Tensor& own);

/// How many elements each has.
std::vector<int64_t> sizes_of(const Tensors& tensors);

/// `parts` receive the inputs of the ranks. Every rank gives them the same sizes.
Work all_gather_list(Communicator& group, Staging& staging, const Tensors& parts, const at::Tensor& input,
                     std::string_view label);

/// `output` receives the reduction of the part with this rank's number. Every rank gives the parts the same sizes.
Work reduce_scatter_list(Communicator& group, Staging& staging, const c10d::ReduceOp& op, const at::Tensor& output,
                         const Tensors& parts, std::string_view label);

} // namespace tessera::python
