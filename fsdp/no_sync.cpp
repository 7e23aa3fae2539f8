#include <tessera/fsdp/no_sync.h>

#include <absl/algorithm/container.h>
#include <absl/container/flat_hash_set.h>
#include <c10/util/Exception.h>

#include <functional>
#include <utility>

#include <tessera/fsdp/foreign_groups.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/module_walk.h>
#include <tessera/fsdp/parameter_group.h>
#include <tessera/fsdp/sharded_module.h>

namespace tessera {

namespace {

using internal::GroupGradients;
using internal::ShardedModule;

template <typename Apply> // void(GroupGradients&)
void for_each_part(ShardedModule& state, const Apply& apply) {
  const auto lock = state.schedule()->lock();
  for (const auto& part : state.parts()) {
    if (part->group()) apply(part->gradients());
  }
}

void open_scope(GroupGradients& gradients) {
  auto& scopes = gradients.no_sync_scopes;
  if (scopes.open++ > 0) return;
  scopes.requires_sync = std::exchange(gradients.requires_sync, false);
  scopes.requires_all_reduce = std::exchange(gradients.requires_all_reduce, false);
}

/// One that `reshard_parameters` has made since has no scope that is open.
void close_scope(GroupGradients& gradients) {
  auto& scopes = gradients.no_sync_scopes;
  if (scopes.open == 0 || --scopes.open > 0) return;
  gradients.requires_sync = scopes.requires_sync;
  gradients.requires_all_reduce = scopes.requires_all_reduce;
}

} // namespace

NoSync::NoSync(const torch::nn::Module& module) {
  absl::flat_hash_set<const ShardedModule*> seen;
  absl::flat_hash_set<const internal::Schedule*> schedules;
  const std::function<void(const torch::nn::Module&)> add = [&](const torch::nn::Module& each) {
    if (!is_sharded(each)) return;
    auto state = fsdp(each).state();
    if (!seen.insert(state.get()).second) return;
    schedules.insert(state->schedule().get());
    modules_.push_back(std::move(state));
  };
  module.apply(add); // on itself as well
  const auto has_groups = [](const auto& state) {
    return absl::c_any_of(state->parts(), [](const auto& part) { return part->group() != nullptr; });
  };
  const bool is_part = absl::c_none_of(modules_, has_groups) && internal::any_parameter(module, internal::parameter_meta);
  TORCH_CHECK_VALUE(!is_part, "no_sync: the parameters of ", module.name(),
                    " were sharded with those of a module above it: take the module that fully_shard was called on");
  internal::check_owns_all_parameters(module, "no_sync", schedules);
  for (const auto& state : modules_) for_each_part(*state, open_scope);
}

NoSync::~NoSync() {
  for (const auto& state : modules_) for_each_part(*state, close_scope);
}

} // namespace tessera
