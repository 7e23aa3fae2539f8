#include <tessera/fsdp/no_sync.h>

#include <absl/container/flat_hash_set.h>

#include <tessera/fsdp/model/foreign_groups.h>
#include <tessera/fsdp/model/sharded_module.h>
#include <tessera/optim/parts/backward_mark.h>

namespace tessera {

namespace {

template <typename Change> // void(GradientSettings&)
void change_settings(const std::vector<std::shared_ptr<internal::ShardedModule>>& modules, const Change& change) {
  for (const auto& state : modules)
    internal::for_each_group(*state, /*recurse=*/false, [&](auto& gradients) { change(gradients.settings); });
}

/// Nothing delays the gradients of a plain parameter.
void check_accumulates(const torch::nn::Module& module) {
  if (!internal::is_any_stepped_in_backward()) return;
  for (const auto& item : module.named_parameters()) {
    TORCH_CHECK(
        !internal::is_stepped_in_backward(item.value()) || internal::parameter_meta(item.value()), "no_sync: ", item.key(),
        " is in no group, and would be stepped in each backward (step_in_backward): shard it too, or take steps after the "
        "backward");
  }
}

} // namespace

NoSync::NoSync(const torch::nn::Module& module) : modules_(internal::sharded_within(module, "no_sync")) {
  check_accumulates(module);
  absl::flat_hash_set<const internal::Schedule*> schedules;
  for (const auto& state : modules_) schedules.insert(state->schedule().get());
  internal::check_owns_all_parameters(module, "no_sync", schedules);
  change_settings(modules_, [](auto& settings) { settings.open_scope(); });
}

NoSync::~NoSync() {
  change_settings(modules_, [](auto& settings) { settings.close_scope(); });
}

} // namespace tessera
