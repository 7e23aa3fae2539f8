#include <tessera/fsdp/sharded_module.h>

#include <algorithm>

namespace tessera::fsdp_internal {

bool ShardedModule::holds(const torch::nn::Module* module) const {
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
