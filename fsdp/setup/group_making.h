#pragma once

// Internal: the steps of `fully_shard` that `reshard_parameters` takes too.

#include <ATen/core/Tensor.h>

#include <memory>
#include <span>
#include <string>
#include <vector>

#include <tessera/fsdp/group/parameter_group.h>
#include <tessera/fsdp/model/sharded_module.h>
#include <tessera/fsdp/setup/census.h>
#include <tessera/fsdp/setup/mesh_parts.h>

namespace tessera::internal {

/// An error unless `parameter` can be sharded over `mesh` in a group with `first`.
void check_parameter(const at::Tensor& parameter, const std::string& name, const at::Tensor& first, const DeviceMesh& mesh);

void move_buffers(const std::vector<Registered>& buffers, c10::Device device);

/// Shards the parameters of `state` as its groups: several where its strategy reduces in buckets, and one for each part that lies
/// otherwise than the module says.
std::vector<std::shared_ptr<ParameterGroup>> make_groups(const std::shared_ptr<ShardedModule>& state,
                                                         std::span<const MeshPart> parts,
                                                         const std::shared_ptr<ModelResources>& resources);

} // namespace tessera::internal
