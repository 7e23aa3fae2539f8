// Models that change after they were sharded.
#include <c10/util/ScopeExit.h>
#include <tessera/fsdp/reshard_parameters.h>
#include <tessera/optim/shard_optimizer.h>

#include <algorithm>

#include <tessera/tests/fsdp/scripts/action.h>
#include <tessera/tests/fsdp/scripts/pass.h>

namespace tessera::testing::scripts {
namespace {

constexpr size_t kMostBlocks = 8;

std::function<void(RandomModel&)> random_change(Draw& draw, bool may_add) {
  const auto kind = may_add ? draw.below(3) : 1 + draw.below(2);
  const auto seed = draw.seed();
  return [kind, seed](RandomModel& model) {
    if (kind == 0 && model.blocks().size() < kMostBlocks) model.add_random_block(seed);
    if (kind == 1) model.renew_head(seed);
    if (kind == 2 && seed % 2 == 0) model.parameters().front().requires_grad_(seed % 4 == 0);
  };
}

/// `reshard_parameters`, or where no parameter is left that was sharded, the sharding of before.
void reshard_model(Trainee& trainee) {
  const auto parameters = trainee.model->parameters();
  if (std::any_of(parameters.begin(), parameters.end(), is_dtensor)) {
    reshard_parameters(*trainee.model);
  } else {
    trainee.take(trainee.shard(*trainee.model));
  }
}

/// One step of the optimizer of before, which goes on without what was added.
void step_as_before(Turn& turn) {
  if (turn.side.sharded) shard_optimizer(*turn.trainee.optimizer);
  const auto loss = random_loss(turn);
  turn.side.record_mean(loss);
  backward(loss);
  turn.trainee.optimizer->step();
  turn.trainee.model->zero_grad();
}

void change_the_model(Turn& turn) {
  auto& trainee = turn.trainee;
  const auto change = random_change(turn.draw, !trainee.policy);
  const bool goes_on = turn.draw.chance(40);
  trainee.forget_state();
  trainee.forget_optimizer();
  trainee.average.reset();
  trainee.make_average = {};
  change(*trainee.model);
  trainee.is_exact = trainee.is_exact && trainee.model->is_double();
  trainee.build = [before = trainee.build, change] {
    auto model = before();
    change(*model);
    return model;
  };
  if (turn.side.sharded) reshard_model(trainee);
  const auto renew =
      c10::make_scope_exit([&] { trainee.optimizer = trainee.plan.make(*trainee.model); }); // after an error as well
  if (goes_on) step_as_before(turn);
}

} // namespace

std::vector<Action> surgery_actions() { return {{"change the model", 5, When::kReduced, change_the_model}}; }

} // namespace tessera::testing::scripts
