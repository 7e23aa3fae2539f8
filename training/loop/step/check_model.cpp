#include <tessera/training/loop/step/check_model.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <absl/container/flat_hash_set.h>

#include <string>
#include <vector>

#include <tessera/base/listing.h>
#include <tessera/fsdp/group/parameter_group.h>
#include <tessera/fsdp/model/foreign_groups.h>
#include <tessera/fsdp/model/sharded_module.h>
#include <tessera/fsdp/setup/trains_apart.h>

namespace tessera::internal {

namespace {

using States = std::vector<std::shared_ptr<ShardedModule>>;

/// An expert's own mesh, or ranks that share sequences and are not among the data ranks.
void check_divisors(const States& states, int64_t data_ranks) {
  std::vector<std::string> others;
  const auto note = [&](const GroupGradients& gradients) {
    const auto& group = gradients.group();
    const auto divisor = gradients.settings.divide_factor.value_or(static_cast<double>(group.roles().mesh().size()));
    if (trains_any(group) && divisor != static_cast<double>(data_ranks))
      others.push_back(fmt::format("{} by {}", group.label(), divisor));
  };
  for (const auto& state : states) for_each_group(*state, /*recurse=*/false, note);
  TORCH_CHECK_VALUE(others.empty(), "Trainer: the losses are added over the ", data_ranks,
                    " data ranks, but the gradients of these are divided by another number:", listing(others),
                    "\nSet TrainerOptions::data_mesh to the ranks over which gradients are averaged, those that share a sequence "
                    "too, or call set_gradient_divide_factor(",
                    data_ranks, ") on the modules");
}

void check_optimizer_has_all(const torch::nn::Module& module, const torch::optim::Optimizer& optimizer) {
  absl::flat_hash_set<const c10::TensorImpl*> stepped, trained;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) stepped.insert(parameter.unsafeGetTensorImpl());
  }
  for (const auto& parameter : parameters_not_ignored(module)) {
    const auto* impl = parameter.unsafeGetTensorImpl();
    if (parameter.requires_grad() && !stepped.contains(impl)) trained.insert(impl);
  }
  std::vector<std::string> names;
  for (const auto& item : module.named_parameters()) {
    if (trained.contains(item.value().unsafeGetTensorImpl())) names.push_back(item.key());
  }
  TORCH_CHECK_VALUE(names.empty(),
                    "Trainer: these parameters train, but the optimizer does not have them, so that their gradients would be "
                    "added up over the steps, and count in the norm:",
                    listing(names), "\nFreeze them (requires_grad_(false)), or give them to the optimizer");
}

} // namespace

void check_trains_together(const torch::nn::Module& module, const torch::optim::Optimizer& optimizer, int64_t data_ranks) {
  const auto states = sharded_within(module, "Trainer");
  TORCH_CHECK_VALUE(data_ranks == 1 || !states.empty(), "Trainer: the module ", module.name(),
                    " is neither sharded nor replicated, so that each of the ", data_ranks,
                    " data ranks would train its own copy: call fully_shard or replicate, or set TrainerOptions::data_mesh");
  check_none_trains_apart(module, "Trainer", "give them to fully_shard as ignored_params");
  check_divisors(states, data_ranks);
  check_optimizer_has_all(module, optimizer);
}

} // namespace tessera::internal
