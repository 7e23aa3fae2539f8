#pragma once

// Internal: what the copies of a mesh share.

#include <c10/core/Device.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/collectives/communicator.h>
#include <tessera/mesh/mesh_layout.h>

namespace tessera::internal {

struct MeshDim {
  int64_t size;
  DimLayout layout;             ///< through the ranks of the root
  std::string name;             ///< empty where the mesh has no names
  CommunicatorPtr communicator; ///< the program's own; null where the process context has it
  bool operator==(const MeshDim&) const = default;
};

struct MeshState {
  /// `origin`: the place in the root where all indices are 0.
  MeshState(at::Device device, RankList ranks, std::vector<MeshDim> dims, int64_t origin,
            std::shared_ptr<const MeshState> root = nullptr);

  const RankList& root_ranks() const { return root ? root->ranks : ranks; }

  at::Device device;
  RankList ranks;
  std::vector<MeshDim> dims;
  int64_t origin;
  std::shared_ptr<const MeshState> root; ///< null where it is its own
  // What follows from these.
  std::vector<int64_t> shape;
  std::vector<std::string> dim_names;
  std::optional<std::vector<int64_t>> coordinate; ///< none for a rank outside
};

/// Formats names as ("dp", "tp").
std::string name_list(const std::vector<std::string>& names);
/// Formats sizes as [2, 2].
std::string size_list(const std::vector<int64_t>& sizes);
/// An error unless there are no names or one for each dim, not empty and each once.
void check_mesh_names(const std::vector<int64_t>& shape, const std::vector<std::string>& names);

} // namespace tessera::internal
