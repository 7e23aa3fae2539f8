#include <tessera/fsdp/layout/mesh_roles.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <string>

namespace tessera::internal {

namespace {

/// Dims of a mesh by their numbers, which rise.
struct DimsOfRoles {
  std::vector<int64_t> outer, inner;
};

std::vector<int64_t> numbers_of(const std::vector<std::string>& names, const DeviceMesh& mesh) {
  std::vector<int64_t> numbers;
  for (const auto& name : names) {
    const auto& known = mesh.dim_names();
    const auto found = std::find(known.begin(), known.end(), name);
    TORCH_CHECK_VALUE(found != known.end(), "fully_shard: data_parallel_dims names the dim \"", name, "\", which ",
                      mesh.to_string(), " does not have");
    numbers.push_back(found - known.begin());
  }
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

std::vector<int64_t> sorted_dims(const DimsOfRoles& dims) {
  auto all = dims.outer;
  all.insert(all.end(), dims.inner.begin(), dims.inner.end());
  std::sort(all.begin(), all.end());
  return all;
}

DimsOfRoles named_dims(const DeviceMesh& mesh, const DataParallelDims& names) {
  DimsOfRoles dims{.outer = numbers_of(names.outer, mesh), .inner = numbers_of(names.inner, mesh)};
  TORCH_CHECK_VALUE(!dims.inner.empty(), "fully_shard: data_parallel_dims names no inner dim of ", mesh.to_string());
  const auto all = sorted_dims(dims);
  const auto twice = std::adjacent_find(all.begin(), all.end());
  TORCH_CHECK_VALUE(twice == all.end(), "fully_shard: data_parallel_dims names the dim \"",
                    mesh.dim_names()[static_cast<size_t>(*twice)], "\" of ", mesh.to_string(), " twice");
  return dims;
}

void check_outer(const DimsOfRoles& dims, const StrategyRow& row, const DeviceMesh& mesh) {
  TORCH_CHECK_VALUE(dims.outer.empty() != row.outer.has_value(), "fully_shard: the strategy ", row.name,
                    row.outer ? " takes outer dims" : " takes no outer dims", ", but data_parallel_dims names ",
                    dims.outer.size(), " of ", mesh.to_string());
}

DimsOfRoles dims_by_number(const DeviceMesh& mesh, const StrategyRow& row) {
  const int64_t dims = row.outer ? 2 : 1;
  TORCH_CHECK_VALUE(mesh.ndim() == dims, "fully_shard: the strategy ", row.name, " takes a ", dims, "-D mesh",
                    row.outer ? " (between groups, inside a group)" : "", ", but the mesh has ", mesh.ndim(),
                    " dims: ", mesh.to_string(), dims == 1 ? "; its flatten() has one" : "",
                    "; data_parallel_dims says which dims of a larger one are meant");
  if (row.outer) return {.outer = {0}, .inner = {1}};
  return {.outer = {}, .inner = {0}};
}

/// The ranks along `dims`, as one dim.
DeviceMesh along(const DeviceMesh& mesh, const std::vector<int64_t>& dims) {
  const auto slice = mesh.slice(dims);
  return slice.ndim() == 1 ? slice : slice.flatten();
}

} // namespace

Strategy default_strategy(const DeviceMesh& mesh, const std::optional<DataParallelDims>& dims) {
  if (dims) return dims->outer.empty() ? Strategy::kFullShard : Strategy::kHybridShard;
  TORCH_CHECK_VALUE(mesh.ndim() == 1 || mesh.ndim() == 2,
                    "fully_shard takes a 1-D mesh (shard) or a 2-D mesh (replicate, shard), but the mesh has ", mesh.ndim(),
                    " dims: ", mesh.to_string(), "; data_parallel_dims says which of them are meant");
  return mesh.ndim() == 1 ? Strategy::kFullShard : Strategy::kHybridShard;
}

DeviceMesh data_parallel_mesh(const DeviceMesh& mesh, const std::optional<DataParallelDims>& dims) {
  if (!dims) return mesh;
  const auto all = sorted_dims(named_dims(mesh, *dims));
  return static_cast<int64_t>(all.size()) == mesh.ndim() ? mesh : mesh.slice(all);
}

MeshRoles::MeshRoles(const DeviceMesh& mesh, Strategy strategy, const std::optional<DataParallelDims>& names)
    : strategy_(strategy) {
  const auto& row = row_of(strategy);
  const auto dims = names ? named_dims(mesh, *names) : dims_by_number(mesh, row);
  check_outer(dims, row, mesh);
  data_parallel_ = data_parallel_mesh(mesh, names);
  std::vector<int64_t> replicas, shards; // of the mesh; of those that shard the innermost first
  const auto add = [&](const std::vector<int64_t>& of_role, const ShardedStates& states) {
    roles_.push_back({along(mesh, of_role), states});
    auto& list = roles_.back().shards() ? shards : replicas;
    list.insert(list.begin(), of_role.begin(), of_role.end());
  };
  if (row.outer) add(dims.outer, *row.outer);
  add(dims.inner, row.inner);
  place_shards(mesh, replicas, shards);
}

/// Makes the mesh of the DTensors, of these dims of `mesh`; those that shard are in the order of the shards.
void MeshRoles::place_shards(const DeviceMesh& mesh, const std::vector<int64_t>& replicas, const std::vector<int64_t>& shards) {
  mesh_ = data_parallel_;
  if (shards.empty()) return;
  if (shards.size() == 1) {
    shard_dim_ = std::count_if(replicas.begin(), replicas.end(), [&](int64_t dim) { return dim < shards[0]; });
  } else {
    std::vector<DeviceMesh> parts;
    for (const auto dim : shards) parts.push_back(mesh.slice({dim}));
    mesh_ = DeviceMesh::concatenate(parts).flatten();
    if (!replicas.empty()) mesh_ = DeviceMesh::concatenate({mesh.slice(replicas), mesh_});
    shard_dim_ = mesh_.ndim() - 1;
  }
  shard_ranks_ = static_cast<int>(mesh_.size(*shard_dim_));
  shard_rank_ = static_cast<int>(mesh_.local_rank(*shard_dim_));
}

bool MeshRoles::is_first_rank() const {
  const auto& place = *data_parallel_.coordinate();
  return std::all_of(place.begin(), place.end(), [](int64_t at) { return at == 0; });
}

Placements MeshRoles::placements(const Placement& along_shard) const {
  Placements placements(static_cast<size_t>(mesh_.ndim()), Replicate{});
  if (shards()) placements[static_cast<size_t>(*shard_dim_)] = along_shard;
  return placements;
}

} // namespace tessera::internal
