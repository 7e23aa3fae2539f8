#pragma once

// Internal: the forwards of a call's modules, as `tessera::call` and `forward_scope` tell of them.

#include <absl/container/flat_hash_set.h>

#include <algorithm>
#include <vector>

#include <tessera/fsdp/model/module_reference.h>

namespace tessera::internal {

/// Knows which calls run, and which of the modules have had a forward since their group was gathered.
class ForwardCalls {
 public:
  void enter_call() { ++running_; }
  void leave_call() { --running_; }
  bool is_called() const { return running_ > 0; }

  /// The group is about to be gathered.
  void forget() { ended_.clear(); }
  /// A forward of `module` has ended. Returns whether all of `modules` that are there have had one; then none has.
  bool end(const torch::nn::Module* module, const std::vector<ModuleReference>& modules) {
    ended_.insert(module);
    const auto has_ended = [&](const ModuleReference& each) { return !each.get() || ended_.contains(each.get()); };
    if (!std::all_of(modules.begin(), modules.end(), has_ended)) return false;
    ended_.clear(); // the group may be gathered again before the next one begins
    return true;
  }

 private:
  int running_ = 0;
  absl::flat_hash_set<const torch::nn::Module*> ended_;
};

} // namespace tessera::internal
