#include <tessera/fsdp/layout/mesh_axes.h>

#include <c10/util/Exception.h>

#include <algorithm>

namespace tessera::internal {

/// A communicator for collectives that the schedule runs on streams of its own.
CommunicatorPtr MeshAxes::connect(const DeviceMesh& mesh, int64_t dim, const char* purpose) const {
  auto communicator = mesh.communicator(dim, use_ == CommunicatorUse::kShared ? "fsdp" : purpose);
  communicator->run_on_current_stream();
  return communicator;
}

Strategy default_strategy(const DeviceMesh& mesh) {
  TORCH_CHECK_VALUE(mesh.ndim() == 1 || mesh.ndim() == 2,
                    "fully_shard takes a 1-D mesh (shard) or a 2-D mesh (replicate, shard), but the mesh has ", mesh.ndim(),
                    " dims: ", mesh.to_string());
  return mesh.ndim() == 1 ? Strategy::kFullShard : Strategy::kHybridShard;
}

MeshAxes::MeshAxes(Strategy strategy, const DeviceMesh& mesh, CommunicatorUse use) : strategy_(strategy), use_(use), mesh_(mesh) {
  const auto& row = row_of(strategy);
  const int64_t dims = row.outer ? 2 : 1;
  TORCH_CHECK_VALUE(mesh.ndim() == dims, "fully_shard: the strategy ", row.name, " takes a ", dims, "-D mesh",
                    row.outer ? " (between groups, inside a group)" : "", ", but the mesh has ", mesh.ndim(),
                    " dims: ", mesh.to_string(), dims == 1 ? "; its flatten() has one" : "");
  if (strategy == Strategy::kNoShard) {
    if (mesh.size() > 1) all_reduce_ = connect(mesh, 0, "fsdp.all_reduce");
  } else if (strategy == Strategy::kHierarchical) {
    shard_hierarchically(mesh);
  } else {
    shard_over(mesh, dims - 1);
    if (row.outer && mesh.size(0) > 1) all_reduce_ = connect(mesh, 0, "fsdp.all_reduce");
  }
}

bool MeshAxes::is_first_rank() const {
  const auto& place = *mesh_.coordinate();
  return std::all_of(place.begin(), place.end(), [](int64_t at) { return at == 0; });
}

int MeshAxes::reducing_ranks() const {
  int ranks = 1;
  for (const auto* communicator : {&reduce_scatter_, &all_reduce_, &outer_reduce_scatter_})
    if (*communicator) ranks *= (*communicator)->size();
  return ranks;
}

bool MeshAxes::averages(at::ScalarType dtype) const {
  bool all_average = true; // one may be the program's own
  for (const auto* communicator : {&reduce_scatter_, &all_reduce_, &outer_reduce_scatter_})
    all_average = all_average && (!*communicator || (*communicator)->averages(dtype));
  return all_average;
}

void MeshAxes::shard_over(const DeviceMesh& mesh, int64_t dim) {
  shard_dim_ = dim;
  shard_ranks_ = static_cast<int>(mesh.size(dim));
  shard_rank_ = static_cast<int>(mesh.local_rank(dim));
  if (shard_ranks_ == 1) return;
  all_gather_ = connect(mesh, dim, "fsdp.all_gather");
  reduce_scatter_ = connect(mesh, dim, "fsdp.reduce_scatter");
}

void MeshAxes::shard_hierarchically(const DeviceMesh& mesh) {
  const int64_t outer = mesh.size(0), inner = mesh.size(1);
  shard_over(mesh, 1);
  if (outer > 1) {
    outer_all_gather_ = connect(mesh, 0, "fsdp.all_gather");
    outer_reduce_scatter_ = connect(mesh, 0, "fsdp.reduce_scatter");
  }
  mesh_ = DeviceMesh::concatenate({mesh.slice({1}), mesh.slice({0})}).flatten();
  shard_dim_ = 0;
  shard_ranks_ = static_cast<int>(outer * inner);
  outer_ranks_ = static_cast<int>(outer);
  shard_rank_ = static_cast<int>(mesh_.local_rank(0));
}

CommunicatorPtr MeshAxes::neighbours(int64_t ranks) const {
  TORCH_CHECK_VALUE(shard_dim_ >= 0, "fully_shard: reshard_after_forward is ", ranks, " ranks, but the strategy ",
                    row_of(strategy_).name, " shards nothing");
  TORCH_CHECK_VALUE(ranks >= 1 && shard_ranks_ % ranks == 0, "fully_shard: reshard_after_forward of ", ranks,
                    " ranks, but these must divide the ", shard_ranks_, " ranks of the shard dim");
  TORCH_CHECK_VALUE(outer_ranks_ == 1, "fully_shard: reshard_after_forward is a number, but the strategy ",
                    row_of(strategy_).name, " says already between which ranks a forward leaves the parameters");
  const auto dim = static_cast<size_t>(shard_dim_);
  auto shape = mesh_.shape();
  shape[dim] /= ranks;
  shape.insert(shape.begin() + shard_dim_ + 1, ranks);
  return connect(make_device_mesh(mesh_.device_type(), shape, mesh_.rank_list()), shard_dim_ + 1, "fsdp.neighbours");
}

Placements MeshAxes::placements(const Placement& along_shard) const {
  Placements placements(static_cast<size_t>(mesh_.ndim()), Replicate{});
  if (shard_dim_ >= 0) placements[static_cast<size_t>(shard_dim_)] = along_shard;
  return placements;
}

} // namespace tessera::internal
