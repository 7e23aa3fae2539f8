#include <tessera/parallel/context/spread_heads.h>

#include <absl/algorithm/container.h>
#include <c10/util/Exception.h>

#include <tessera/dtensor/api.h>
#include <tessera/dtensor/calls/planned_meshes.h>
#include <tessera/dtensor/redistribute/move.h>
#include <tessera/mesh/part_order.h>
#include <tessera/parallel/tensor/key_heads.h>

namespace tessera::internal {

namespace {

void check_mesh(const at::Tensor& tensor, const at::Tensor& query, const DeviceMesh& sequence) {
  TORCH_CHECK_VALUE(is_dtensor(tensor) && is_dtensor(query) && DTensor(tensor).mesh() == DTensor(query).mesh(), kContextCaller,
                    ": query, key and value are plain, each rank's part, or DTensors of one mesh");
  const auto& mesh = DTensor(tensor).mesh();
  const auto& others = sequence.ranks();
  const auto shared = absl::c_count_if(mesh.ranks(), [&](int64_t rank) { return absl::c_linear_search(others, rank); });
  TORCH_CHECK_VALUE(shared <= 1 && !part_dim(mesh), kContextCaller,
                    ": with a mesh, query, key and value are plain: each rank's part, or DTensors of other ranks, as those of "
                    "mesh[\"tp\"] are beside mesh[\"cp\"]; they are on ",
                    mesh.to_string(), ", and the sequence is split over ", sequence.to_string());
}

/// The number of ranks over which `dim` is split.
int64_t ranks_of(const Spec& spec, int64_t dim) {
  int64_t ranks = 1;
  for (size_t i = 0; i < spec.placements().size(); ++i) {
    if (shards_dim(spec.placements()[i], dim)) ranks *= spec.mesh().size(static_cast<int64_t>(i));
  }
  return ranks;
}

/// `tensor`, whole on the mesh of a plan where it lies on groups of its ranks; as it is elsewhere.
at::Tensor on_plan(const at::Tensor& tensor) {
  const auto* meta = dtensor_meta(tensor);
  const auto line = meta ? dispatch::PlannedMeshes::instance().line_of(meta->spec->mesh()) : std::nullopt;
  return line ? parallel::on_line(tensor, *line, kContextCaller) : tensor;
}

} // namespace

QueryKeyValue spread_alike(const at::Tensor& given, const at::Tensor& key, const at::Tensor& value, const DeviceMesh& sequence) {
  const auto query = on_plan(given);
  const bool has_more = parallel::has_more_key_heads(query, key, true) && parallel::has_more_key_heads(query, value, true);
  const auto k = has_more ? parallel::own_key_heads(query, key) : on_plan(key);
  const auto v = has_more ? parallel::own_key_heads(query, value) : on_plan(value);
  for (const auto* tensor : {&query, &k, &v}) check_mesh(*tensor, query, sequence);
  const auto& spec = DTensor(query).spec();
  auto placements = spec.placements();
  for (auto& placement : placements) {
    const auto* shard = std::get_if<Shard>(&placement);
    const bool stays = shard && shard->dim < query.dim() - 2 && query.size(shard->dim) % ranks_of(spec, shard->dim) == 0 &&
                       k.size(shard->dim) % ranks_of(spec, shard->dim) == 0;
    if (!stays) placement = Replicate{};
  }
  const auto brought = [&](const at::Tensor& tensor) {
    return differentiable_move(tensor, spec.mesh(), placements, kContextCaller);
  };
  return {brought(query), brought(k), brought(v)};
}

} // namespace tessera::internal
