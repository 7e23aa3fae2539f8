#pragma once

// Internal: one file a transition. Each takes this rank's tensor under `from` and returns it under `to`.

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>
#include <vector>

#include <tessera/dtensor/placement.h>
#include <tessera/dtensor/sharding_math.h>
#include <tessera/mesh/device_mesh.h>

namespace tessera::redistribute {

/// What a transition on one mesh dim needs to know.
struct Transition {
  const DeviceMesh& mesh;
  size_t mesh_dim;
  /// The tensor's shape without this mesh dim's split; placement dims count its dims.
  std::vector<int64_t> sizes;
  Placement from, to;
  std::string label;

  int64_t rank() const { return mesh.local_rank(static_cast<int64_t>(mesh_dim)); }
  int64_t ranks() const { return mesh.size(static_cast<int64_t>(mesh_dim)); }
  CommunicatorPtr communicator() const { return mesh.communicator(static_cast<int64_t>(mesh_dim)); }
  int64_t numel() const { return product(sizes, 0, sizes.size()); }
};

/// Shard or RaggedShard → Replicate.
at::Tensor all_gather(const at::Tensor& local, const Transition& transition);
/// Partial → Replicate.
at::Tensor all_reduce(const at::Tensor& local, const Transition& transition);
/// Partial → Shard or RaggedShard.
at::Tensor reduce_scatter(const at::Tensor& local, const Transition& transition);
/// Shard → Shard of another dim.
at::Tensor all_to_all(const at::Tensor& local, const Transition& transition);
/// Shard(0) or RaggedShard → Shard(0) or RaggedShard: moves of ranges of the row-major elements.
at::Tensor move_ranges(const at::Tensor& local, const Transition& transition);
/// Replicate → Shard or RaggedShard. The result is a view.
at::Tensor slice(const at::Tensor& local, const Transition& transition);
/// Anything but Partial → Partial, without communication.
at::Tensor to_partial(const at::Tensor& local, const Transition& transition);

/// This rank's part of `whole` (of shape `transition.sizes`) under the sharded `placement`; a view where possible.
at::Tensor part_of(const at::Tensor& whole, const Placement& placement, int64_t ranks, int64_t rank);
/// The shape of `rank`'s part of a tensor of shape `sizes`.
std::vector<int64_t> part_sizes(const std::vector<int64_t>& sizes, const Placement& placement, int64_t ranks, int64_t rank);

/// The element ranges of all ranks, for a Shard(0) or a RaggedShard.
std::vector<Extent> flat_ranges(const std::vector<int64_t>& sizes, const Placement& placement, int64_t ranks);

/// What a reduction sends, and what it makes of the sum that comes back (p-norms; bool as bytes; complex as pairs).
at::Tensor encode(const at::Tensor& values, const Partial& partial);
at::Tensor decode(const at::Tensor& reduced, const Partial& partial, at::ScalarType dtype);
/// The communicator's operation for `partial`.
ReduceOp wire_op(const Partial& partial);

} // namespace tessera::redistribute
