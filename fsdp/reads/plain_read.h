#pragma once

// Internal: reads of which forward gets the plain leaf, as of most parameters.

#include <ATen/core/Tensor.h>

#include <tessera/fsdp/group/sharded_parameter.h>

namespace tessera::internal {

/// Whether forward reads the plain leaf where it reads `tensor`: the parameter of `meta` or a shallow copy of it.
bool is_plain_in_forward(const ParameterMeta& meta, const at::Tensor& tensor);

/// That leaf, gathered. Valid as long as the group.
const at::Tensor& read_plain(const ParameterMeta& meta, const at::Tensor& tensor);

} // namespace tessera::internal
