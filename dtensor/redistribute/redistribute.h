#pragma once

// Internal: moves a tensor's data from one placement to another.

#include <ATen/core/Tensor.h>

#include <string_view>
#include <vector>

#include <tessera/dtensor/dtensor_impl.h>
#include <tessera/dtensor/spec.h>

namespace tessera {

/// One move on one mesh dim.
struct RedistributeStep {
  size_t mesh_dim;
  Placement to;
  bool operator==(const RedistributeStep&) const = default;
};

/// The moves from `from` to `to`, in order. A split of an outer mesh dim is only changed while no inner mesh dim splits the same
/// tensor dim; moves that shrink the data come first. Depends on the placements alone, so every rank plans alike.
std::vector<RedistributeStep> plan_redistribute(const Placements& from, const Placements& to);

/// The local tensor of `to`, from that of `from` (same mesh, shape and dtype). Every rank of the mesh calls it. The result may
/// share memory with `local`. `label` names the tensor or operator in errors. On a rank outside the mesh: `local`.
at::Tensor redistribute_local(const at::Tensor& local, const Spec& from, const Spec& to, std::string_view label);

/// As above for a DTensor's meta; the value of a one-element Partial tensor is kept, so that it is reduced once.
at::Tensor redistribute_local(const at::Tensor& dtensor, DTensorMeta& meta, const SpecPtr& to, std::string_view label);

/// What a move on a mesh dim of `ranks` ranks costs, in bytes (a collective's latency counts as some), for a tensor that holds
/// `bytes` without that mesh dim's split. Infinite where no such move exists.
double redistribute_cost(const Placement& from, const Placement& to, double bytes, int64_t ranks);

} // namespace tessera
