#pragma once

// Internal: the state behind an FSDPModule handle.

#include <memory>
#include <string>
#include <vector>

#include <absl/container/flat_hash_set.h>

#include <tessera/fsdp/options.h>
#include <tessera/fsdp/parameter_group.h>
#include <tessera/fsdp/schedule.h>

namespace torch::nn {
class Module;
}

namespace tessera::fsdp_internal {

/// What one `fully_shard` call made. Ownership runs upward: parameters own their group, a group its module state, a state its
/// parent. So a model's states live as long as any of its parameters.
class ShardedModule : public std::enable_shared_from_this<ShardedModule> {
 public:
  ShardedModule(std::vector<const torch::nn::Module*> modules, MeshAxes axes, const FullyShardOptions& options);

  bool holds(const torch::nn::Module* module) const;
  const std::vector<const torch::nn::Module*>& modules() const { return modules_; }
  /// `module` was below this one when `fully_shard` took it.
  bool held_below(const torch::nn::Module* module) const { return below_.contains(module); }
  void add_below(const torch::nn::Module* module) { below_.insert(module); }
  /// An error that names a parameter which was registered, and requires a gradient, since `fully_shard` took the module.
  void check_no_new_parameter() const;
  const MeshAxes& axes() const { return axes_; }
  const FullyShardOptions& options() const { return options_; }

  /// Null for a module all of whose parameters belong to the groups below.
  std::shared_ptr<ParameterGroup> group() const { return group_.lock(); }
  void set_group(const std::shared_ptr<ParameterGroup>& group) { group_ = group; }

  const std::shared_ptr<ShardedModule>& parent() const { return parent_; }
  /// Puts `child` and all below it under this module and its schedule.
  void adopt(const std::shared_ptr<ShardedModule>& child);
  bool is_root() const { return parent_ == nullptr; }
  /// This module or one above it.
  bool is_self_or_ancestor_of(const ShardedModule& other) const;
  /// This state and those below it.
  std::vector<std::shared_ptr<ShardedModule>> subtree();

  const std::shared_ptr<Schedule>& schedule() const { return schedule_; }
  void set_schedule(const std::shared_ptr<Schedule>& schedule);

  /// Whether a touch elsewhere frees this group between forward and backward.
  bool reshards_after_forward() const { return options_.reshard_after_forward.value_or(!is_root()); }
  void set_reshard_after_forward(bool reshard) { options_.reshard_after_forward = reshard; }

  int64_t initial_checksum = 0; ///< of its group's values, as `agree_on_initial_weights` returned it
  int64_t model_number = 0;     ///< of the model that this call made or completed; on a root it is in its groups' labels

 private:
  std::vector<const torch::nn::Module*> modules_; // compared by address, never dereferenced
  absl::flat_hash_set<const torch::nn::Module*> below_;
  std::vector<std::weak_ptr<const torch::nn::Module>> alive_; // the modules that a shared_ptr holds
  MeshAxes axes_;
  FullyShardOptions options_;
  std::weak_ptr<ParameterGroup> group_;
  std::shared_ptr<ShardedModule> parent_;
  std::vector<std::weak_ptr<ShardedModule>> children_;
  std::shared_ptr<Schedule> schedule_;
};

/// The schedule of the model that `group` belongs to.
Schedule& schedule_of(const ParameterGroup& group);

} // namespace tessera::fsdp_internal
