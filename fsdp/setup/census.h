#pragma once

// Internal: the parameters that a `fully_shard` call meets.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include <tessera/fsdp/model/module_walk.h>
#include <tessera/mesh/device_mesh.h>

namespace tessera::internal {

class ShardedModule;

/// A parameter or buffer, registered as `key` in the module of a visit.
struct Registered {
  at::Tensor tensor;
  const ModuleWalk::Visit* visit;
  std::string key;
};

/// The parameters below the given modules: those still free, those of groups made by earlier calls, those that the caller left
/// out, and the models of the sharded.
struct Census {
  explicit Census(const std::vector<torch::nn::Module*>& modules) : walk(modules) {}
  std::string name_of(const Registered& item) const { return walk.name(walk.place_of(*item.visit, item.key)); }

  ModuleWalk walk;
  std::vector<Registered> free, sharded, ignored, buffers;
  std::vector<std::shared_ptr<ShardedModule>> roots; // of the sharded, unique
};

/// An error for one of `ignored_params` that is undefined or sharded already. Those of other modules are passed over.
Census take_census(const std::vector<torch::nn::Module*>& modules, const std::vector<at::Tensor>& ignored_params);

/// An error where two parameters share memory: they would become two shards that no longer change together.
void check_own_memory(const Census& census);

/// What every rank of `mesh` must have met alike: the models below that lie on the same ranks, in the order of their parameters,
/// with what their values were (ranks that broadcast them in different orders mixed them up), and the parameters that are left
/// out.
std::string describe(const Census& census, const DeviceMesh& mesh);

} // namespace tessera::internal
