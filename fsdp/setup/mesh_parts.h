#pragma once

// Internal: the parameters of a `fully_shard` call by the ranks on which they lie.

#include <optional>
#include <string>
#include <vector>

#include <tessera/fsdp/group/parameter_group.h>
#include <tessera/fsdp/layout/mesh_roles.h>
#include <tessera/fsdp/layout/stages.h>
#include <tessera/fsdp/options.h>
#include <tessera/mesh/device_mesh.h>

namespace tessera::internal {

/// The mesh and the strategy of a call.
struct CallMesh {
  DeviceMesh given;         ///< as the call got it
  DeviceMesh data_parallel; ///< the dims of it that are meant
  Strategy strategy;
};

/// Parameters that lie on the same ranks, and are all split or all whole.
struct MeshPart {
  DeviceMesh mesh;       ///< that the program chose; undefined: the call's
  bool is_whole = false; ///< every rank has them
  std::vector<FreeParameter> parameters = {};
  std::vector<std::string> names = {}; ///< for errors
  std::optional<double> divisor = {};  ///< of the gradients of experts; none for other parameters
  std::optional<MeshRoles> roles = {}; ///< once all ranks have agreed on the call
  Stages stages = {};                  ///< once they are connected

  /// Whether it lies otherwise than the call says.
  bool is_beside() const { return is_whole || mesh.defined(); }
};

/// Splits the parameters of a call: those for which the program chose nothing else come first. Nothing is communicated.
std::vector<MeshPart> split_by_mesh(const std::vector<FreeParameter>& parameters, const std::vector<std::string>& names,
                                    const CallMesh& call);

/// Gives each part its roles, and has those on meshes of their own agree on their values. An error on every rank of the call
/// where it fails on one.
void agree_on_parts(std::vector<MeshPart>& parts, const CallMesh& call, const FullyShardOptions& options,
                    const std::string& name);

/// Connects the ranks of each part.
void connect_parts(std::vector<MeshPart>& parts, const FullyShardOptions& options);

} // namespace tessera::internal
