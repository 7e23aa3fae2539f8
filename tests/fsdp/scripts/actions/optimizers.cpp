// Changes of the optimizer, and steps in backward.
#include <tessera/fsdp/step_in_backward.h>

#include <optional>

#include <tessera/tests/fsdp/scripts/action.h>
#include <tessera/tests/fsdp/scripts/pass.h>

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

/// As a program that has no optimizer, or one of its own.
void step_by_hand(Turn& turn) {
  const torch::NoGradGuard no_grad;
  const auto kind = turn.draw.below(5);
  for (auto& parameter : distinct(turn.trainee.model->parameters())) {
    const auto& gradient = parameter.grad();
    if (!gradient.defined() || !parameter.requires_grad()) continue;
    switch (kind) {
      case 0: parameter.sub_(gradient, 0.02); break;
      case 1: parameter.sub_(gradient * 0.02 + parameter * 0.001); break;
      case 2: parameter.data().add_(gradient, -0.02); break;
      case 3: parameter.copy_(parameter - 0.02 * gradient); break;
      default: parameter.mul_(0.99).addcdiv_(gradient, gradient * gradient + 1, -0.02);
    }
  }
}

/// The gradients of parameters in no optimizer stay.
void train_in_backward(Turn& turn) {
  const bool also_unsharded = turn.draw.chance(50), is_moved = turn.draw.chance(30);
  const int64_t steps = 1 + turn.draw.below(2);
  auto& trainee = turn.trainee;
  if (trainee.ignores || trainee.policy) return;
  trainee.model->zero_grad();
  trainee.optimizer->zero_grad();
  std::optional<StepInBackward> stepping;
  if (turn.side.sharded || also_unsharded) stepping.emplace(step_in_backward(*trainee.model, *trainee.optimizer));
  if (stepping && is_moved) stepping.emplace(StepInBackward(std::move(*stepping)));
  for (int64_t step = 0; step < steps; ++step) {
    const auto loss = random_loss(turn);
    turn.side.record_mean(loss);
    backward(loss);
    if (stepping) continue;
    trainee.optimizer->step();
    trainee.optimizer->zero_grad();
  }
}

} // namespace

std::vector<Action> optimizer_actions() {
  return {{"change the learning rate", 3, When::kAnywhere, change_learning_rate},
          {"step by hand", 4, When::kReduced, step_by_hand},
          {"train in backward", 5, When::kReduced, train_in_backward},
          {"add a group", 3, When::kReduced, add_group},
          {"switch the optimizer", 3, When::kReduced, switch_optimizer}};
}

} // namespace tessera::testing::scripts
