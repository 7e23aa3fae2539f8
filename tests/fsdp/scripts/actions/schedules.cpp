// Schedules of the learning rate.
#include <cmath>

#include <tessera/tests/fsdp/scripts/action.h>
#include <tessera/tests/fsdp/scripts/pass.h>

namespace tessera::testing::scripts {
namespace {

using SchedulePtr = std::unique_ptr<LRSchedule>;

/// A formula of the program's own.
SchedulePtr own_schedule(torch::optim::Optimizer& optimizer, double decay) {
  const auto formula = [decay](double base, int64_t step) { return base * std::pow(decay, static_cast<double>(step)); };
  return std::make_unique<LRSchedule>(optimizer, "exponential", LRSchedule::Settings{{"decay", decay}}, formula);
}

std::function<SchedulePtr(torch::optim::Optimizer&)> random_schedule(Draw& draw) {
  const auto kind = draw.below(5), warmup = draw.below(4), total = 6 + draw.below(20);
  const auto shape = draw.of(std::vector<DecayShape>{DecayShape::kCosine, DecayShape::kLinear, DecayShape::kOneMinusSqrt});
  const auto warmup_shape = draw.chance(50) ? WarmupShape::kLinear : WarmupShape::kLog;
  return [=](torch::optim::Optimizer& optimizer) -> SchedulePtr {
    for (auto& group : optimizer.param_groups()) group.options().set_lr(0.01); // whatever it was changed to
    switch (kind) {
      case 0: return std::make_unique<WarmupCosineLR>(optimizer, WarmupOptions{warmup, total, 0.1, 0.1});
      case 1: return std::make_unique<WarmupLinearLR>(optimizer, WarmupOptions{warmup, total, 0, 0.2});
      case 2: return std::make_unique<WarmupDecayLR>(optimizer, WarmupDecayOptions{total, 0.001, 0.02, 2 + warmup, warmup_shape});
      case 3: return own_schedule(optimizer, 0.9);
      default: return std::make_unique<WSDLR>(optimizer, WSDOptions{warmup, total / 2, 5, 0.1, 0.1, shape});
    }
  };
}

void train_with_a_schedule(Turn& turn) {
  auto& trainee = turn.trainee;
  const auto make = random_schedule(turn.draw);
  if (!trainee.schedule) {
    trainee.make_schedule = make;
    trainee.schedule = make(*trainee.optimizer);
  }
  const int64_t steps = 1 + turn.draw.below(3);
  for (int64_t step = 0; step < steps; ++step) {
    trainee.optimizer->zero_grad();
    const auto loss = random_loss(turn);
    turn.side.record_mean(loss);
    backward(loss);
    trainee.optimizer->step();
    trainee.schedule->step();
    for (const auto lr : trainee.schedule->lrs()) turn.side.recorded.push_back({lr, false});
    for (auto& group : trainee.optimizer->param_groups()) turn.side.recorded.push_back({group.options().get_lr(), false});
  }
}

} // namespace

std::vector<Action> schedule_actions() { return {{"train with a schedule", 8, When::kReduced, train_with_a_schedule}}; }

} // namespace tessera::testing::scripts
