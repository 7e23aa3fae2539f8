#pragma once

// Internal: one file a transition. Each takes this rank's tensor under `from` and returns it under `to`.

#include <ATen/core/Scalar.h>
#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include <tessera/collectives/work.h>
#include <tessera/dtensor/layout/sharding_math.h>
#include <tessera/dtensor/placement.h>
#include <tessera/mesh/device_mesh.h>

namespace tessera::internal::redistribute {

/// A collective that is waited for later, and what is then done to its output.
struct Deferred {
  Work work;
  bool started = false;
  std::vector<std::function<at::Tensor(const at::Tensor&)>> then;
};

/// What a transition on one mesh dim needs to know.
struct Transition {
  const DeviceMesh& mesh;
  size_t mesh_dim;
  /// The tensor's shape without this mesh dim's split; placement dims count its dims.
  std::vector<int64_t> sizes;
  Placement from, to;
  std::string label;
  Deferred* deferred = nullptr; ///< null: every collective is waited for at once
  bool signs_checked = false;   ///< what becomes part of a norm is known to have no negative values
  bool parts_differ = false;    ///< the ranks of other mesh dims may not see the same values

  int64_t rank() const { return mesh.local_rank(static_cast<int64_t>(mesh_dim)); }
  int64_t ranks() const { return mesh.size(static_cast<int64_t>(mesh_dim)); }
  CommunicatorPtr communicator() const { return mesh.communicator(static_cast<int64_t>(mesh_dim)); }
  int64_t numel() const { return product(sizes, 0, sizes.size()); }
};

/// Waits for `work`, or leaves that to `transition.deferred`.
inline void wait_for(Work work, const Transition& transition) {
  if (!transition.deferred) return work.wait();
  transition.deferred->work = std::move(work);
  transition.deferred->started = true;
}

/// `part` as a collective sends it: contiguous, and in memory of its own where it is sent while others may write `local`.
inline at::Tensor to_send(const at::Tensor& part, const at::Tensor& local, const Transition& transition) {
  const bool copies = transition.deferred && part.is_alias_of(local);
  return copies ? part.clone(at::MemoryFormat::Contiguous) : part.contiguous();
}

/// `step(output)`, once the collective that writes `output` is done. Returns `output` where that is left to
/// `transition.deferred`.
template <typename Step>
at::Tensor after(at::Tensor output, const Transition& transition, const Step& step) {
  if (!transition.deferred || !transition.deferred->started) return step(output);
  transition.deferred->then.push_back(step);
  return output;
}

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

/// What a reduction sends, and what it makes of what comes back (p-norms; bool as bytes; complex as pairs; averages of halves in
/// float; numbers that are compared as integers).
at::Tensor encode(const at::Tensor& values, const Partial& partial, const Communicator& communicator);
at::Tensor decode(const at::Tensor& reduced, const Partial& partial, at::ScalarType dtype);
/// The value that does not change what `op` reduces to.
at::Scalar neutral_value(Partial::Op op, at::ScalarType dtype);
/// The communicator's operation for `partial` of tensors of `dtype`.
ReduceOp wire_op(const Partial& partial, at::ScalarType dtype);

} // namespace tessera::internal::redistribute
