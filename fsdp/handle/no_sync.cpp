#include <tessera/fsdp/no_sync.h>

#include <absl/container/flat_hash_set.h>

#include <tessera/fsdp/model/foreign_groups.h>
#include <tessera/fsdp/model/sharded_module.h>

namespace tessera {

namespace {

template <typename Change> // void(GradientSettings&)
void change_settings(const std::vector<std::shared_ptr<internal::ShardedModule>>& modules, const Change& change) {
  for (const auto& state : modules)
    internal::for_each_group(*state, /*recurse=*/false, [&](auto& gradients) { change(gradients.settings); });
}

} // namespace

NoSync::NoSync(const torch::nn::Module& module) : modules_(internal::sharded_within(module, "no_sync")) {
  absl::flat_hash_set<const internal::Schedule*> schedules;
  for (const auto& state : modules_) schedules.insert(state->schedule().get());
  internal::check_owns_all_parameters(module, "no_sync", schedules);
  change_settings(modules_, [](auto& settings) { settings.open_scope(); });
}

NoSync::~NoSync() {
  change_settings(modules_, [](auto& settings) { settings.close_scope(); });
}

} // namespace tessera
