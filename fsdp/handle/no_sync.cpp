#include <tessera/fsdp/no_sync.h>

#include <absl/algorithm/container.h>
#include <absl/container/flat_hash_set.h>
#include <c10/util/Exception.h>

#include <functional>
#include <utility>

#include <tessera/fsdp/group/parameter_group.h>
#include <tessera/fsdp/model/foreign_groups.h>
#include <tessera/fsdp/model/module_walk.h>
#include <tessera/fsdp/model/sharded_module.h>

namespace tessera {

namespace {

template <typename Change> // void(GradientSettings&)
void change_settings(const std::vector<std::shared_ptr<internal::ShardedModule>>& modules, const Change& change) {
  for (const auto& state : modules)
    internal::for_each_group(*state, /*recurse=*/false, [&](auto& gradients) { change(gradients.settings); });
}

} // namespace

NoSync::NoSync(const torch::nn::Module& module) {
  absl::flat_hash_set<const internal::ShardedModule*> seen;
  absl::flat_hash_set<const internal::Schedule*> schedules;
  const std::function<void(const torch::nn::Module&)> add = [&](const torch::nn::Module& each) {
    auto state = internal::find_state(each);
    if (!state || !seen.insert(state.get()).second) return;
    schedules.insert(state->schedule().get());
    modules_.push_back(std::move(state));
  };
  module.apply(add); // on itself as well
  const auto has_groups = [](const auto& state) { return !state->groups().empty(); };
  const bool is_part = absl::c_none_of(modules_, has_groups) && internal::any_parameter(module, internal::parameter_meta);
  TORCH_CHECK_VALUE(!is_part, "no_sync: the parameters of ", module.name(),
                    " were sharded with those of a module above it: take the module that fully_shard was called on");
  internal::check_owns_all_parameters(module, "no_sync", schedules);
  change_settings(modules_, [](auto& settings) { settings.open_scope(); });
}

NoSync::~NoSync() {
  change_settings(modules_, [](auto& settings) { settings.close_scope(); });
}

} // namespace tessera
