#pragma once

// Internal: the state behind an FSDPModule handle.

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <tessera/fsdp/gradients/group_gradients.h>
#include <tessera/fsdp/group/parameter_group.h>
#include <tessera/fsdp/group/place.h>
#include <tessera/fsdp/model/forward_calls.h>
#include <tessera/fsdp/model/module_reference.h>
#include <tessera/fsdp/model/sharded_model.h>
#include <tessera/fsdp/options.h>
#include <tessera/fsdp/schedule/schedule.h>

namespace torch::nn {
class Module;
}

namespace tessera::internal {

/// What a `fully_shard` call was given.
struct ShardingCall {
  std::vector<ModuleReference> modules;
  std::string class_name;
  MeshRoles roles;
  FullyShardOptions options;
};

/// What one `fully_shard` call made. Ownership runs upward: parameters own their group, a group its module state, a state its
/// parent. So a model's states live as long as any of its parameters.
class ShardedModule final : public GroupOwner, public std::enable_shared_from_this<ShardedModule> {
 public:
  explicit ShardedModule(ShardingCall call);

  bool holds(const torch::nn::Module* module) const;
  /// The modules as `fully_shard` got them; null for one that is gone.
  std::vector<const torch::nn::Module*> modules() const;
  /// The modules that a shared_ptr holds and that are there.
  std::vector<std::shared_ptr<const torch::nn::Module>> living_modules() const;
  void check_no_new_parameter() const override;
  void check_boundary() const override;
  bool is_called() const override { return forwards_.is_called(); }
  void note_rounding(const std::string& name, at::ScalarType from, at::ScalarType to) const override;
  /// A `tessera::call` or a `forward_scope` of one of the modules begins.
  void begin_forward();
  /// Ends the forward of `module`; returns whether all of the modules have had one since the group was gathered.
  bool end_forward(const torch::nn::Module* module);
  void enter_call() { forwards_.enter_call(); }
  void leave_call() { forwards_.leave_call(); }
  bool ignores(const at::Tensor& parameter) const override { return model_->ignores(parameter); }
  const MeshRoles& roles() const { return call_.roles; }
  const FullyShardOptions& options() const { return call_.options; }

  /// Sets groups in place of those before. Several where the strategy reduces in buckets, or where parameters lie on other ranks.
  void set_groups(const std::vector<std::shared_ptr<ParameterGroup>>& groups);
  const std::vector<ModuleGroup>& module_groups() const { return groups_; }
  /// The groups that there are: none for a module all of whose parameters belong to other groups.
  std::vector<std::shared_ptr<ParameterGroup>> groups() const;
  /// The first of them; null for none.
  std::shared_ptr<ParameterGroup> group() const;
  /// The gradients of `group()`, while it lives.
  GroupGradients& gradients(const Held& held) const { return first_group()->gradients->get(held); }
  PrefetchSettings& prefetch_settings() { return *prefetch_settings_; }

  const std::shared_ptr<ShardedModule>& parent() const { return parent_; }
  /// Puts `child` and all below it under this root. `places` says for each module of `child` where it lies; `settle` must follow.
  void adopt(const std::shared_ptr<ShardedModule>& child, std::vector<Place> places);
  /// Keeps `state` alive as long as this one, as a part of the same model. `state` is of a module whose parameters this one has.
  void keep_beside(const std::shared_ptr<ShardedModule>& state);
  /// The state of `module`: this one, or one beside it; null for neither.
  std::shared_ptr<ShardedModule> state_of(const torch::nn::Module* module);
  /// Gives those below this state, a root, its model, and numbers all. The model's groups follow `schedule` from now on.
  void attach(const std::shared_ptr<Schedule>& schedule);
  bool is_root() const { return parent_ == nullptr; }
  /// The top of the tree. Call it after `settle`.
  std::shared_ptr<ShardedModule> root() const { return model_->root.lock(); }
  std::string label() const override;
  /// Where the root holds several modules, the number of the one above is in front. Empty for the module of a root.
  std::string path(size_t index) const override;
  /// Makes states again that went with all their parameters, of modules right below this one that `is_there` finds. Each goes
  /// again unless it gets parameters.
  std::vector<std::shared_ptr<ShardedModule>> revive_below(const std::function<bool(const torch::nn::Module*)>& is_there);
  /// This state and those below it, from the top.
  std::vector<std::shared_ptr<ShardedModule>> subtree();
  /// The groups of these states.
  std::vector<std::shared_ptr<ParameterGroup>> subtree_groups();

  /// The model of this tree. A state that `adopt` put below another has it only after `settle`.
  ShardedModel& model() const { return *model_; }
  const std::shared_ptr<Schedule>& schedule() const { return model_->schedule; }
  /// Notes the names of this root's parameters for its model, where they have others now.
  void note_names();

  /// In which a `tessera::call` hands floating-point inputs to the module: `param_dtype`, or Float where all of the parameters
  /// that are its own are kept in fp32. None: as they are.
  std::optional<at::ScalarType> boundary_dtype();
  bool reshards_after_forward() const override;
  void set_reshard_after_forward(bool reshard) { call_.options.reshard_after_forward = reshard; }

  int64_t initial_checksum = 0; ///< of its group's values, as `agree_on_initial_weights` returned it

 private:
  bool casts_outputs_to(at::ScalarType dtype) const;
  std::vector<ModuleGroup>::const_iterator first_group() const;
  void enter(Schedule& schedule, std::vector<ScheduledGroup>& all);

  ShardingCall call_;
  std::shared_ptr<ShardedModel> model_ = std::make_shared<ShardedModel>();
  std::vector<ModuleGroup> groups_;
  std::shared_ptr<PrefetchSettings> prefetch_settings_ = std::make_shared<PrefetchSettings>();
  std::shared_ptr<ShardedModule> parent_;
  std::vector<Place> places_; // of the modules below the parent's
  /// What makes a state again that went with the last of its parameters.
  struct Child {
    std::weak_ptr<ShardedModule> state;
    ShardingCall call;
    std::vector<Place> places;
  };
  std::vector<Child> children_;
  std::vector<std::shared_ptr<ShardedModule>> beside_;
  size_t number_ = 0; // of its first group, or what would be it
  ForwardCalls forwards_;
};

/// The state that `group` was made for.
inline ShardedModule& state_of_group(const ParameterGroup& group) { return static_cast<ShardedModule&>(*group.owner); }

/// The schedule of the model that `group` belongs to.
inline Schedule& schedule_of(const ParameterGroup& group) { return *state_of_group(group).schedule(); }

/// The state of a module that was sharded; null for any other.
std::shared_ptr<ShardedModule> find_state(const torch::nn::Module& module);

/// Applies to the groups of `state` or, with `recurse`, of all below it as well.
template <typename Apply> // void(GroupGradients&)
void for_each_group(const Held& held, ShardedModule& state, bool recurse, const Apply& apply) {
  for (const auto& each : recurse ? state.subtree() : std::vector{state.shared_from_this()}) {
    for (const auto& [weak, gradients] : each->module_groups()) {
      if (const auto group = weak.lock()) apply(gradients->get(held));
    }
  }
}

/// The same, and takes the lock of the model.
template <typename Apply>
void for_each_group(ShardedModule& state, bool recurse, const Apply& apply) {
  const ModelLock lock(state.schedule()->mutex());
  for_each_group(lock, state, recurse, apply);
}

} // namespace tessera::internal
