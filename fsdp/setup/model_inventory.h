#pragma once

// Internal: what `reshard_parameters` finds in a model.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <absl/container/flat_hash_map.h>

#include <tessera/fsdp/group/parameter_group.h>
#include <tessera/fsdp/model/sharded_module.h>
#include <tessera/fsdp/setup/census.h>

namespace tessera::internal {

/// A parameter in the model as it is now.
struct PresentParameter {
  at::Tensor tensor;
  Place place = {};                   // among the modules of its state
  std::string name = {};              // from the root
  DeviceMesh mesh = {};               // whose ranks all have it
  ShardedParameter* before = nullptr; // null for a new one
  at::ScalarType dtype = at::kFloat;  // from now on
};

/// One that the model had, and has no more.
struct RemovedParameter {
  std::string name;
  DeviceMesh mesh; // whose ranks all had it
};

/// A state with its parameters as they are now, in the order in which `fully_shard` would meet them.
struct ModuleInventory {
  std::shared_ptr<ShardedModule> state;
  std::vector<std::shared_ptr<ParameterGroup>> groups; // as they are until now
  std::vector<PresentParameter> present;
  std::vector<at::ScalarType> read_dtypes; // of these, in forward from now on
  std::vector<RemovedParameter> removed;

  bool is_changed() const {
    return !removed.empty() || std::any_of(present.begin(), present.end(), [](const PresentParameter& each) {
      return !each.before || each.before->spec->dtype() != each.dtype;
    });
  }
  /// The mesh whose ranks all have the parameters of one of the groups: the module's, or one that shard_placement_fn chose.
  DeviceMesh mesh_of(const ParameterGroup& group) const {
    const auto &own = state->roles().mesh(), &other = group.roles().mesh();
    return other.rank_list() == own.rank_list() ? own : other;
  }
};

/// A model and what belongs to whom in it.
class ModelInventory {
 public:
  /// Lists all but `ignored`. `dtype` is the dtype of all floating-point parameters from now on; unset: they keep theirs.
  ModelInventory(torch::nn::Module& module, const std::vector<at::Tensor>& ignored, std::optional<at::ScalarType> dtype);

  std::vector<ModuleInventory>& inventories() { return inventories_; }
  ShardedModule& root() { return *root_; }
  /// Parameters that went with all others of their group: nothing holds them.
  const std::vector<std::string>& gone() const { return gone_; }
  /// Whether shard_placement_fn chose meshes, of which each rank may have others.
  bool has_chosen_meshes() const;
  /// Modules below a sharded one cannot be sharded by themselves.
  void claim_new_modules();
  const Census& census() const { return census_; }
  /// The modules of a state that are still in the model.
  std::vector<torch::nn::Module*> modules_of(const ShardedModule& state) const;

 private:
  void check_root(const torch::nn::Module& module) const;
  void list_states();
  void enter(const Registered& item, std::optional<at::ScalarType> dtype);
  void note_removed();
  /// The number and the path of a visit from the next module above that `state`, or if null any state, holds.
  struct Above {
    ShardedModule* state = nullptr;
    size_t top = 0;
    std::string path;
  };
  Above above(const Registered& item, const ShardedModule* state) const;

  Census census_;
  std::shared_ptr<ShardedModule> root_;
  std::vector<std::shared_ptr<ShardedModule>> revived_;
  std::vector<ModuleInventory> inventories_;
  std::vector<std::string> gone_;
  absl::flat_hash_map<const ShardedModule*, size_t> positions_;
  absl::flat_hash_map<const torch::nn::Module*, std::pair<ShardedModule*, size_t>> held_;
};

} // namespace tessera::internal
