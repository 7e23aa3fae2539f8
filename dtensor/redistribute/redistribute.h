#pragma once

// Internal: moves a tensor's data from one placement to another.

#include <ATen/core/Tensor.h>

#include <string_view>
#include <vector>

#include <tessera/dtensor/redistribute/route.h>
#include <tessera/dtensor/spec.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>

namespace tessera::internal {

namespace redistribute {
struct Deferred;
}

/// The same move on one mesh dim, or on all mesh dims of several ranks taken as one.
struct RedistributeStep {
  std::vector<size_t> mesh_dims;
  Placement to;
  redistribute::Route route = {};
  bool operator==(const RedistributeStep& other) const { return mesh_dims == other.mesh_dims && to == other.to; }
};

/// The cheapest sequence of moves from `from` to `to` by `redistribute::price`, for a tensor of shape `sizes` with elements of
/// `element` bytes on a mesh of shape `ranks`. A split of an outer mesh dim is only changed while no inner mesh dim splits the
/// same tensor dim. The same on every rank.
std::vector<RedistributeStep> plan_redistribute(const Placements& from, const Placements& to, const std::vector<int64_t>& ranks,
                                                const std::vector<int64_t>& sizes, double element);

/// What these moves cost together, as `redistribute::price`.
double redistribute_price(const Placements& from, const Placements& to, const std::vector<int64_t>& ranks,
                          const std::vector<int64_t>& sizes, double element);

/// What redistribute_local is asked for beyond the move itself.
struct MoveRequest {
  redistribute::Deferred* deferred = nullptr; ///< the last collective is only started, and the result is what this makes of it
  bool signs_checked = false;                 ///< what becomes part of a norm is known to have no negative values
};

/// The signed type that stands for an unsigned one which few kernels know, else `dtype`: bits move alike, and sums and products
/// are the same.
at::ScalarType signed_type(at::ScalarType dtype);

/// The local tensor of `to`, from that of `from` (same mesh, shape and dtype). Every rank of the mesh calls it. The result may
/// share memory with `local`. `label` names the tensor or operator in errors. On a rank outside the mesh: `local`.
at::Tensor redistribute_local(const at::Tensor& local, const Spec& from, const Spec& to, std::string_view label,
                              const MoveRequest& request = {});

/// Redistributes by a DTensor's meta; the value of a one-element Partial tensor is kept, so that it is reduced once while nothing
/// writes it. The result is the caller's own, or the local tensor.
at::Tensor redistribute_local(const at::Tensor& dtensor, DTensorMeta& meta, const SpecPtr& to, std::string_view label,
                              const MoveRequest& request = {});

/// Lets go of the value that is kept for `meta`; with `for_good`, none is kept again.
void forget_reduced_value(DTensorMeta& meta, bool for_good = false);

/// The local tensor and spec of a DTensor after Partial, RaggedShard and StridedShard have become Replicate.
std::pair<at::Tensor, SpecPtr> only_shards(const at::Tensor& dtensor, const char* label);

/// The local tensor of `to`, on another mesh over the same ranks, from that of `from`, which has only Shard and Replicate. Every
/// rank receives what it lacks once, from a rank that holds it.
at::Tensor move_between_meshes(const at::Tensor& local, const Spec& from, const Spec& to, std::string_view label);

/// True when both have the same local tensor: they differ on mesh dims of one rank only.
bool same_local(const Spec& from, const Spec& to);

} // namespace tessera::internal
