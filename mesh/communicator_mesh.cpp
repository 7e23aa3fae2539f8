// Meshes over communicators that the program made.

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include <tessera/collectives/process_context.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/mesh/mesh_state.h>

namespace tessera {

namespace {

/// The ranks of dim `dim` of the mesh must stand in the communicator as they do in the mesh.
void check_line(const DeviceMesh& mesh, int64_t dim, const Communicator& communicator) {
  const auto line = mesh.slice({dim}).rank_list();
  const auto& ranks = communicator.rank_list();
  const auto check = [&](bool holds, const auto&... problem) {
    TORCH_CHECK(holds, "mesh_from_communicators: the communicator \"", communicator.name(), "\" of the ranks ",
                internal::size_list(ranks.expanded()), " for dim ", dim, " of ", mesh.to_string(), problem...);
  };
  check(communicator.device_type() == mesh.device_type(), " is for tensors on ", communicator.device_type());
  for (int64_t place = 0; place < line.size(); ++place) {
    const auto found = ranks.index_of(line[place]);
    check(found.has_value(), " lacks rank ", line[place], ", which the mesh has at place ", place);
    check(*found == place, " has rank ", line[place], " at place ", *found, ", but the mesh at place ", place);
  }
  check(ranks.size() == line.size(), " has rank ", ranks[std::min(line.size(), ranks.size() - 1)],
        ", which the mesh does not have in this dim");
}

} // namespace

DeviceMesh mesh_from_communicator(const CommunicatorPtr& communicator, const std::string& dim_name) {
  TORCH_CHECK(communicator, "mesh_from_communicator: the communicator is null");
  return mesh_from_communicators({communicator}, {communicator->size()}, communicator->rank_list(),
                                 dim_name.empty() ? std::vector<std::string>() : std::vector<std::string>{dim_name});
}

DeviceMesh mesh_from_communicators(const std::vector<CommunicatorPtr>& communicators, std::vector<int64_t> shape,
                                   const RankList& ranks, std::vector<std::string> dim_names) {
  TORCH_CHECK(communicators.size() == shape.size() && !shape.empty(), "mesh_from_communicators: ", communicators.size(),
              " communicators for a mesh of shape ", internal::size_list(shape), ", which has ", shape.size(), " dims");
  for (size_t dim = 0; dim < shape.size(); ++dim)
    TORCH_CHECK(communicators[dim], "mesh_from_communicators: the communicator of dim ", dim, " is null");
  const auto mesh = make_device_mesh(communicators[0]->device_type(), std::move(shape), ranks, std::move(dim_names));
  TORCH_CHECK(mesh.coordinate(), "mesh_from_communicators: rank ", process_context().rank(), " is not in ", mesh.to_string());
  auto dims = mesh.impl().dims;
  for (size_t dim = 0; dim < dims.size(); ++dim) {
    check_line(mesh, static_cast<int64_t>(dim), *communicators[dim]);
    dims[dim].communicator = communicators[dim];
  }
  return DeviceMesh(std::make_shared<internal::MeshState>(mesh.device(), mesh.rank_list(), std::move(dims), /*origin=*/0));
}

} // namespace tessera
