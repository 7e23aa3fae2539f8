#pragma once

// Internal: for kernels on locals that talk to the ranks that hold the other parts of a dim.

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <vector>

#include <tessera/collectives/communicator.h>
#include <tessera/dtensor/spec.h>

namespace tessera::internal::rules {

/// The mesh dims of several ranks that split tensor dim `dim`, or any without one.
inline std::vector<int64_t> splitting_mesh_dims(const Spec& spec, std::optional<int64_t> dim) {
  std::vector<int64_t> mesh_dims;
  for (int64_t m = 0; m < spec.mesh().ndim(); ++m) {
    const auto& placement = spec.placements()[m];
    if (spec.mesh().size(m) > 1 && (dim ? shards_dim(placement, *dim) : is_sharded(placement))) mesh_dims.push_back(m);
  }
  return mesh_dims;
}

/// True when there is such a mesh dim.
inline bool splits(const Spec& spec, std::optional<int64_t> dim = std::nullopt) {
  return !splitting_mesh_dims(spec, dim).empty();
}

/// The reduction of `tensor` over these mesh dims; in place where it can be.
inline at::Tensor reduce_over_split(const at::Tensor& tensor, const Spec& spec, std::optional<int64_t> dim, ReduceOp op,
                                    std::string_view label) {
  auto result = tensor.contiguous();
  for (const auto m : splitting_mesh_dims(spec, dim)) {
    if (result.numel() > 0) spec.mesh().communicator(m)->all_reduce(result.view(-1), op, label).wait();
  }
  return result;
}

} // namespace tessera::internal::rules
