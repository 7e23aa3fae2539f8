#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <string>
#include <vector>

#include <tessera/fsdp/fsdp_module.h>
#include <tessera/fsdp/options.h>
#include <tessera/mesh/device_mesh.h>

namespace tessera {

struct AutoShardOptions {
  FullyShardOptions shard = {};
  /// Bytes of parameters, as forward reads them, that a group should not exceed: a module with more is split further where its
  /// children allow it. 0: a block of those that repeat is one group, whatever its size.
  int64_t budget = 0;
};

/// The groups that `auto_shard` makes, by the paths of their modules, in the order in which forward is thought to read them; the
/// root, which has the rest, is not among them. Modules that stand in one entry are one group.
///
/// Repeated blocks are found by structure: children of one module with the same classes, shapes and dtypes below them. What is
/// not a block is a group of its own if it has many parameters (an embedding, a head), and is otherwise joined to its neighbours.
/// Local.
std::vector<std::vector<std::string>> auto_groups(const torch::nn::Module& module, const AutoShardOptions& options = {});

/// `fully_shard` of each of these groups and of the root: a model is sharded without a loop over its blocks. Returns the root's
/// handle. Every rank of the mesh calls it, and errors are those of `fully_shard`.
FSDPModule auto_shard(torch::nn::Module& module, const DeviceMesh& mesh, const AutoShardOptions& options = {});

} // namespace tessera
