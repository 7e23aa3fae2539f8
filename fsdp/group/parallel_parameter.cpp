#include <tessera/fsdp/group/parallel_parameter.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <variant>

#include <tessera/dtensor/api.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>

namespace tessera::internal {

void check_parallel(const at::Tensor& parameter, const std::string& name, const DeviceMesh& mesh) {
  const auto& spec = *dtensor_meta(parameter)->spec;
  const auto check = [&](bool holds, const auto&... problem) {
    TORCH_CHECK_VALUE(holds, "fully_shard: the parameter ", name, " is a DTensor already, ", spec.to_string(), problem...);
  };
  try {
    DeviceMesh::concatenate({mesh, spec.mesh()});
  } catch (const c10::Error& error) {
    check(false, ", and cannot be sharded over ", mesh.to_string(),
          " besides, which takes other dims of one mesh: ", error.what_without_backtrace());
  }
  for (const auto& placement : spec.placements()) {
    check(is_replicate(placement) || std::holds_alternative<Shard>(placement) || is_strided(placement),
          ", and only a parameter that is Shard, StridedShard or Replicate over other dims can be sharded further");
  }
}

SpecPtr spec_in_forward(const Spec& parallel, at::ScalarType dtype) {
  return Spec::intern(parallel.mesh(), parallel.placements(), parallel.sizes(), dtype);
}

namespace {

/// Along the shard dim, seen from the global tensor: of a dim that foreign dims have split before, each rank has a part of each
/// chunk.
Placement seen_globally(const Placement& along_shard, const Spec& parallel) {
  const auto* shard = std::get_if<Shard>(&along_shard);
  if (!shard) return along_shard;
  int64_t chunks = 1;
  for (size_t dim = 0; dim < parallel.placements().size(); ++dim) {
    const auto* other = std::get_if<Shard>(&parallel.placements()[dim]);
    if (other && other->dim == shard->dim) chunks *= parallel.mesh().size(static_cast<int64_t>(dim));
  }
  return chunks > 1 ? Placement(StridedShard{shard->dim, chunks}) : along_shard;
}

} // namespace

SpecPtr shard_further(const Spec& parallel, at::ScalarType dtype, const MeshAxes& axes, const Placement& along_shard) {
  if (std::any_of(parallel.placements().begin(), parallel.placements().end(), is_strided)) {
    auto nested = parallel.placements(); // the parts of a part have no name with the data-parallel dims first
    const auto inner = axes.placements(along_shard);
    nested.append(inner.begin(), inner.end());
    return Spec::intern(DeviceMesh::concatenate({parallel.mesh(), axes.mesh()}), nested, parallel.sizes(), dtype);
  }
  auto placements = axes.placements(seen_globally(along_shard, parallel));
  placements.append(parallel.placements().begin(), parallel.placements().end());
  return Spec::intern(DeviceMesh::concatenate({axes.mesh(), parallel.mesh()}), placements, parallel.sizes(), dtype);
}

at::Tensor as_parallel(const at::Tensor& leaf, const Spec& parallel) {
  return from_local(leaf, parallel.mesh(), parallel.placements(), parallel.sizes(), parallel.strides());
}

} // namespace tessera::internal
