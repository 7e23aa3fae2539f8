#include <tessera/fsdp/model/foreign_groups.h>

#include <absl/algorithm/container.h>

#include <functional>
#include <utility>

#include <tessera/fsdp/model/module_walk.h>
#include <tessera/fsdp/model/sharded_module.h>

namespace tessera::internal {

void check_owns_all_parameters(const torch::nn::Module& module, const char* what,
                               const absl::flat_hash_set<const Schedule*>& schedules) {
  any_parameter(module, [&](const at::Tensor& parameter) {
    const auto* meta = parameter.requires_grad() ? parameter_meta(parameter) : nullptr; // nothing of a frozen one is reduced
    TORCH_CHECK_VALUE(!meta || schedules.contains(&schedule_of(*meta->group)), what, ": the parameter ",
                      meta->group->full_name(meta->index), " of the model ", state_of_group(*meta->group).root()->label(),
                      " lies below ", module.name(), " as well, which is another model and does not reach it: call fully_shard ",
                      "on a module above both");
    return false;
  });
}

std::vector<std::shared_ptr<ShardedModule>> sharded_within(const torch::nn::Module& module, const char* what) {
  std::vector<std::shared_ptr<ShardedModule>> states;
  absl::flat_hash_set<const ShardedModule*> seen;
  const std::function<void(const torch::nn::Module&)> add = [&](const torch::nn::Module& each) {
    auto state = find_state(each);
    if (state && seen.insert(state.get()).second) states.push_back(std::move(state));
  };
  module.apply(add); // on itself as well
  const auto has_groups = [](const auto& state) { return !state->groups().empty(); };
  const bool is_part = absl::c_none_of(states, has_groups) && any_parameter(module, parameter_meta);
  TORCH_CHECK_VALUE(!is_part, what, ": the parameters of ", module.name(),
                    " were sharded with those of a module above it: take the module that fully_shard was called on");
  return states;
}

std::vector<std::shared_ptr<ShardedModule>> foreign_modules_below(const ShardedModule& state) {
  std::vector<torch::nn::Module*> tops;
  const auto alive = state.living_modules();
  for (const auto& each : alive) tops.push_back(const_cast<torch::nn::Module*>(each.get()));
  absl::flat_hash_set<ShardedModule*> met;
  for (const auto* top : tops) {
    any_parameter(*top, [&](const at::Tensor& parameter) {
      const auto* meta = parameter_meta(parameter);
      if (meta && &schedule_of(*meta->group) != state.schedule().get()) met.insert(&state_of_group(*meta->group));
      return false;
    });
  }
  std::vector<std::shared_ptr<ShardedModule>> below;
  if (met.empty()) return below;
  const ModuleWalk walk(tops);
  for (auto* each : met) {
    const auto modules = each->modules();
    if (absl::c_all_of(modules, [&](const auto* module) { return walk.contains(module); }))
      below.push_back(each->shared_from_this());
  }
  return below;
}

} // namespace tessera::internal
