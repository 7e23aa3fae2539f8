#pragma once

// Internal: parts of sequences whose heads are split over other ranks, by tensor parallelism.

#include <ATen/core/Tensor.h>

#include <tessera/mesh/device_mesh.h>

namespace tessera::internal {

/// Begins the errors of attention over split sequences.
inline constexpr const char* kContextCaller = "context_parallel_attention";

struct QueryKeyValue {
  at::Tensor query, key, value;
};

/// DTensors that lie alike: batch and heads are split as those of the query are, where these divide, and all else is whole. An
/// error unless they are DTensors of one mesh that shares this rank alone with `sequence`, the ranks that split the sequence.
QueryKeyValue spread_alike(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const DeviceMesh& sequence);

} // namespace tessera::internal
