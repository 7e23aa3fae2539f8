#include <tessera/fsdp/no_sync.h>

#include <absl/container/flat_hash_set.h>
#include <c10/util/Exception.h>

#include <functional>

#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/module_walk.h>
#include <tessera/fsdp/parameter_group.h>
#include <tessera/fsdp/sharded_module.h>

namespace tessera {

NoSync::NoSync(const torch::nn::Module& module) {
  absl::flat_hash_set<const internal::ShardedModule*> seen;
  const std::function<void(const torch::nn::Module&)> add = [&](const torch::nn::Module& each) {
    if (!is_sharded(each)) return;
    const auto state = fsdp(each).state();
    if (!seen.insert(state.get()).second) return;
    const auto lock = state->schedule()->lock();
    for (const auto& part : state->parts()) {
      if (!part->group()) continue;
      auto& gradients = part->gradients();
      settings_.push_back({part, gradients.requires_sync, gradients.requires_all_reduce});
      gradients.requires_sync = gradients.requires_all_reduce = false;
    }
  };
  module.apply(add); // on itself as well
  const bool is_part = seen.empty() && internal::any_parameter(module, internal::parameter_meta);
  TORCH_CHECK_VALUE(!is_part, "no_sync: the parameters of ", module.name(),
                    " were sharded with those of a module above it: take the module that fully_shard was called on");
}

NoSync::~NoSync() {
  for (const auto& [state, requires_sync, requires_all_reduce] : settings_) {
    const auto lock = state->schedule()->lock();
    if (!state->group()) continue;
    state->gradients().requires_sync = requires_sync;
    state->gradients().requires_all_reduce = requires_all_reduce;
  }
}

} // namespace tessera
