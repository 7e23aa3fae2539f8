#include <tessera/fsdp/sharded_module.h>

#include <torch/nn/module.h>

#include <algorithm>

#include <tessera/dtensor/dtensor_impl.h>

namespace tessera::fsdp_internal {

namespace {

using torch::nn::Module;

/// Module's registry of parameters, without the copy that `named_parameters` makes.
struct Registry : Module {
  static const auto& parameters(const Module& module) { return module.*(&Registry::parameters_); }
};

bool is_new(const at::Tensor& parameter) { return parameter.defined() && parameter.requires_grad() && !dtensor_meta(parameter); }

bool has_new_parameter(const Module& module) {
  for (const auto& item : Registry::parameters(module)) {
    if (is_new(item.value())) return true;
  }
  const auto children = module.children();
  return std::any_of(children.begin(), children.end(), [](const auto& child) { return has_new_parameter(*child); });
}

} // namespace

ShardedModule::ShardedModule(std::vector<const Module*> modules, MeshAxes axes, const FullyShardOptions& options)
    : modules_(std::move(modules)), axes_(std::move(axes)), options_(options) {
  for (const auto* module : modules_) alive_.push_back(module->weak_from_this());
}

void ShardedModule::check_no_new_parameter() const {
  for (const auto& weak : alive_) {
    const auto module = weak.lock();
    if (!module || !has_new_parameter(*module)) continue;
    for (const auto& item : module->named_parameters()) {
      TORCH_CHECK(!is_new(item.value()), "the parameter ", item.key(), " of ", module->name(),
                  " was registered after fully_shard, and its gradients would differ between the ranks: register it first, call "
                  "fully_shard on its module as well, or set requires_grad_(false)");
    }
  }
}

bool ShardedModule::holds(const Module* module) const {
  return std::find(modules_.begin(), modules_.end(), module) != modules_.end();
}

void ShardedModule::adopt(const std::shared_ptr<ShardedModule>& child) {
  child->parent_ = shared_from_this();
  child->set_schedule(schedule_);
  children_.push_back(child);
}

bool ShardedModule::is_self_or_ancestor_of(const ShardedModule& other) const {
  for (const auto* state = &other; state; state = state->parent_.get()) {
    if (state == this) return true;
  }
  return false;
}

std::vector<std::shared_ptr<ShardedModule>> ShardedModule::subtree() {
  std::vector<std::shared_ptr<ShardedModule>> states{shared_from_this()};
  for (const auto& weak : children_) {
    if (const auto child = weak.lock()) {
      const auto below = child->subtree();
      states.insert(states.end(), below.begin(), below.end());
    }
  }
  return states;
}

void ShardedModule::set_schedule(const std::shared_ptr<Schedule>& schedule) {
  for (const auto& state : subtree()) state->schedule_ = schedule;
}

Schedule& schedule_of(const ParameterGroup& group) { return *group.owner->schedule(); }

} // namespace tessera::fsdp_internal
