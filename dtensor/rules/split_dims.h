#pragma once

// Internal: for kernels on locals that talk to the ranks that hold the other parts of a dim.

#include <ATen/core/Tensor.h>

#include <string_view>

#include <tessera/collectives/communicator.h>
#include <tessera/dtensor/spec.h>

namespace tessera::rules {

/// True when a mesh dim of several ranks splits tensor dim `dim`.
inline bool splits(const Spec& spec, int64_t dim) {
  for (size_t m = 0; m < spec.placements().size(); ++m) {
    if (shards_dim(spec.placements()[m], dim) && spec.mesh().shape()[m] > 1) return true;
  }
  return false;
}

/// The reduction of `tensor` over the mesh dims that split tensor dim `dim` of `spec`; in place where it can be.
inline at::Tensor reduce_over_split(const at::Tensor& tensor, const Spec& spec, int64_t dim, ReduceOp op,
                                    std::string_view label) {
  auto result = tensor.contiguous();
  for (size_t m = 0; m < spec.placements().size(); ++m) {
    if (!shards_dim(spec.placements()[m], dim) || spec.mesh().shape()[m] == 1 || result.numel() == 0) continue;
    spec.mesh().communicator(static_cast<int64_t>(m))->all_reduce(result.view(-1), op, label).wait();
  }
  return result;
}

/// The reduction over all mesh dims that split any dim of `spec`.
inline at::Tensor reduce_over_splits(const at::Tensor& tensor, const Spec& spec, ReduceOp op, std::string_view label) {
  auto result = tensor.contiguous();
  for (size_t m = 0; m < spec.placements().size(); ++m) {
    if (!is_sharded(spec.placements()[m]) || spec.mesh().shape()[m] == 1) continue;
    spec.mesh().communicator(static_cast<int64_t>(m))->all_reduce(result.view(-1), op, label).wait();
  }
  return result;
}

} // namespace tessera::rules
