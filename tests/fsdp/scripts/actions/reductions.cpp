// What programs change in the reduction of gradients.
#include <c10/util/ScopeExit.h>
#include <tessera/collectives/process_context.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/model/sharded_module.h>

#include <tessera/tests/fsdp/scripts/action.h>
#include <tessera/tests/fsdp/scripts/pass.h>
#include <tessera/tests/fsdp/scripts/random_optimizer.h>

namespace tessera::testing::scripts {
namespace {

/// Calls `set` for each sharded module.
template <typename Set>
void for_each_handle(const RandomModel& model, const Set& set) {
  for (const auto& module : model.modules()) {
    if (is_sharded(*module)) set(fsdp(*module));
  }
}

/// One backward in which the mean over the ranks is multiplied by `factor`: on the sharded side where it is reduced, on the other
/// by hooks of the parameters.
void backward_times(Turn& turn, double factor) {
  std::vector<std::pair<Tensor, unsigned>> hooks;
  if (!turn.side.sharded) {
    for (const auto& parameter : distinct(turn.trainee.model->parameters())) {
      if (!parameter.requires_grad()) continue;
      hooks.emplace_back(parameter, parameter.register_hook([factor](const Tensor& gradient) { return gradient * factor; }));
    }
  }
  const auto remove = c10::make_scope_exit([&] {
    for (auto& [parameter, hook] : hooks) parameter.remove_hook(hook);
  });
  const auto loss = random_loss(turn, {}, /*may_recompute=*/true, /*may_mix_dtensors=*/false);
  turn.side.record_mean(loss);
  backward(loss);
}

void reduce_otherwise(Turn& turn) {
  const auto world = static_cast<double>(process_context().world_size());
  const double divisor = turn.draw.of(std::vector<double>{world, 1, 2 * world, 3});
  const double in_hook = turn.draw.of(std::vector<double>{1, 0.5, 1.5});
  const auto& model = *turn.trainee.model;
  if (turn.trainee.ignores) return;
  turn.note(c10::str("divided by ", divisor, ", times ", in_hook, " in a hook"));
  if (turn.side.sharded) {
    for_each_handle(model, [&](FSDPModule module) {
      module.set_gradient_divide_factor(divisor);
      if (in_hook != 1) module.set_all_reduce_hook([=](const Tensor& flat) { flat.mul_(in_hook); });
    });
  }
  const auto reset = c10::make_scope_exit([&] {
    if (!turn.side.sharded) return;
    for_each_handle(model, [&](FSDPModule module) {
      module.set_gradient_divide_factor(world);
      module.set_all_reduce_hook({});
    });
  });
  backward_times(turn, world / divisor * in_hook);
}

/// Another communicator of the same ranks, for some groups and from now on.
void use_own_communicators(Turn& turn) {
  const bool gathers = turn.draw.chance(60), reduces = turn.draw.chance(60);
  const auto chosen = turn.draw.below(1 << 6);
  if (!turn.side.sharded) return;
  int64_t number = 0;
  for_each_handle(*turn.trainee.model, [&](FSDPModule module) {
    const auto group = module.state()->group();
    if (!group || (chosen >> (number++ % 6)) % 2 == 0) return;
    module.reshard(); // it may be on its way
    const auto another = [](const CommunicatorPtr& old) {
      return process_context().communicator(RankList(old->ranks()), old->device_type(), "own");
    };
    if (gathers && group->stages().inner_gather().communicator)
      module.set_custom_all_gather(another(group->stages().inner_gather().communicator));
    if (reduces && group->stages().reduce_scatter()) module.set_custom_reduce_scatter(another(group->stages().reduce_scatter()));
  });
}

} // namespace

std::vector<Action> reduction_actions() {
  return {{"reduce otherwise", 6, When::kReduced, reduce_otherwise},
          {"use own communicators", 2, When::kReduced, use_own_communicators}};
}

} // namespace tessera::testing::scripts
