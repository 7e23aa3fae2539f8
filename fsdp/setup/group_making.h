#pragma once

// Internal: the steps of `fully_shard` that `reshard_parameters` takes too.

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <tessera/fsdp/group/parameter_group.h>
#include <tessera/fsdp/model/sharded_module.h>
#include <tessera/fsdp/setup/census.h>

namespace tessera::internal {

/// An error unless `parameter` can be sharded over `mesh` in a group with `first`.
void check_parameter(const at::Tensor& parameter, const std::string& name, const at::Tensor& first, const DeviceMesh& mesh);

/// "unset", "true", "false" or a number of ranks.
std::string text_of_reshard_after_forward(const std::optional<ReshardAfterForward>& option);

/// Connects the ranks among which a forward leaves the parameters; null where it leaves all or this rank's shard. Every rank of
/// `axes` calls it. An error where the option does not fit the strategy.
CommunicatorPtr connect_neighbours(const MeshAxes& axes, const std::optional<ReshardAfterForward>& option);

void move_buffers(const std::vector<Registered>& buffers, c10::Device device);

/// Shards the parameters of `state` as its groups: several where its strategy reduces in buckets. `neighbours` may be null.
std::vector<std::shared_ptr<ParameterGroup>> make_groups(const std::shared_ptr<ShardedModule>& state,
                                                         std::span<const FreeParameter> all,
                                                         const std::shared_ptr<ModelResources>& resources,
                                                         const CommunicatorPtr& neighbours);

} // namespace tessera::internal
