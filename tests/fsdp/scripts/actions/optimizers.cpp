// Changes of the optimizer, and steps in backward.
#include <tessera/fsdp/no_sync.h>
#include <tessera/fsdp/step_in_backward.h>
#include <tessera/optim/adaptive_clip.h>

#include <optional>

#include <tessera/tests/fsdp/scripts/action.h>
#include <tessera/tests/fsdp/scripts/pass.h>
#include <tessera/tests/fsdp/scripts/random_optimizer.h>

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

enum class Limit { kNone, kByValue, kByUnit };

void limit_gradients(const std::vector<Tensor>& parameters, Limit limit) {
  std::vector<Tensor> limited;
  for (const auto& parameter : parameters) {
    if (parameter.scalar_type() == torch::kDouble && parameter.grad().defined()) limited.push_back(parameter);
  }
  if (limited.empty()) return;
  if (limit == Limit::kByValue) torch::nn::utils::clip_grad_value_(limited, 0.05);
  if (limit == Limit::kByUnit) clip_grad_adaptive_(limited, 0.1);
}

void step_after(torch::optim::Optimizer& optimizer, Limit limit) {
  std::vector<Tensor> all;
  for (const auto& group : optimizer.param_groups()) all.insert(all.end(), group.params().begin(), group.params().end());
  limit_gradients(distinct(all), limit);
  optimizer.step();
  optimizer.zero_grad();
}

/// A group whose only gradients come before a second run reads it, as that of a bias beside a frozen weight, is an error.
bool may_recompute(const RandomModel& model) {
  const auto all = model.parameters();
  return std::all_of(all.begin(), all.end(), [](const Tensor& each) { return each.requires_grad(); });
}

/// A backward that only adds to the gradients, and another one that reduces all of them.
void accumulate_twice(Turn& turn) {
  {
    std::optional<NoSync> scope;
    if (turn.side.sharded) scope.emplace(*turn.trainee.model);
    const auto loss = random_loss(turn, {}, /*may_recompute=*/false, /*may_mix_dtensors=*/false);
    turn.side.record_mean(loss);
    backward(loss);
  }
  const auto loss = whole_loss(turn.side, turn.trainee, turn.draw.seed(), Squares::kBounded);
  turn.side.record_mean(loss);
  backward(loss);
}

/// The gradients of parameters in no optimizer stay. What a backward reads once it is stepped is an error, which another order of
/// the steps may not meet.
void train_in_backward(Turn& turn) {
  const bool accumulates = turn.draw.chance(30), also_unsharded = turn.draw.chance(50) && !accumulates;
  const bool is_moved = turn.draw.chance(30);
  const auto limit = turn.draw.of(std::vector{Limit::kNone, Limit::kNone, Limit::kByValue, Limit::kByUnit});
  const int64_t steps = 1 + turn.draw.below(2);
  auto& trainee = turn.trainee;
  if (trainee.ignores || trainee.policy || trainee.model->reads_beside_gradient()) return;
  turn.note(c10::str(also_unsharded ? "on both sides" : "beside steps after the backward",
                     accumulates ? ", of two backwards" : "", ", limit ", static_cast<int>(limit)));
  trainee.model->zero_grad();
  trainee.optimizer->zero_grad();
  std::optional<StepInBackward> stepping;
  StepInBackwardOptions options;
  if (limit != Limit::kNone)
    options.before_step = [limit](const std::vector<Tensor>& parameters) { limit_gradients(parameters, limit); };
  if (turn.side.sharded || also_unsharded) stepping.emplace(step_in_backward(*trainee.model, *trainee.optimizer, options));
  if (stepping && is_moved) stepping.emplace(StepInBackward(std::move(*stepping)));
  for (int64_t step = 0; step < steps; ++step) {
    if (accumulates) {
      accumulate_twice(turn);
    } else {
      const auto loss = random_loss(turn, {}, may_recompute(*trainee.model));
      turn.side.record_mean(loss);
      backward(loss);
    }
    if (!stepping) step_after(*trainee.optimizer, limit);
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
