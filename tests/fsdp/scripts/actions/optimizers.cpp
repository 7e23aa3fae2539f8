// Changes of the optimizer.
#include <tessera/tests/fsdp/scripts/action.h>

namespace tessera::testing::scripts {
namespace {

void change_learning_rate(Turn& turn) {
  const double factor = turn.draw.chance(50) ? 0.5 : 1.5;
  for (auto& group : turn.trainee.optimizer->param_groups()) group.options().set_lr(group.options().get_lr() * factor);
}

void add_group(Turn& turn) {
  auto& trainee = turn.trainee;
  if (trainee.plan.add_group(*trainee.optimizer, *trainee.model)) trainee.forget_optimizer();
}

void switch_optimizer(Turn& turn) {
  auto& trainee = turn.trainee;
  trainee.plan = OptimizerPlan(turn.draw);
  turn.note("to " + trainee.plan.name());
  trainee.forget_optimizer();
  trainee.optimizer = trainee.plan.make(*trainee.model);
}

} // namespace

std::vector<Action> optimizer_actions() {
  return {{"change the learning rate", 3, When::kAnywhere, change_learning_rate},
          {"add a group", 3, When::kReduced, add_group},
          {"switch the optimizer", 3, When::kReduced, switch_optimizer}};
}

} // namespace tessera::testing::scripts
