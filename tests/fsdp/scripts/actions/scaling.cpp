// Steps with a scaled loss.
#include <tessera/collectives/process_context.h>
#include <tessera/optim/grad_norm.h>
#include <tessera/training/grad_scaler.h>

#include <limits>

#include <tessera/tests/fsdp/scripts/action.h>
#include <tessera/tests/fsdp/scripts/pass.h>

namespace tessera::testing::scripts {
namespace {

GradScalerOptions random_scaler(Draw& draw) {
  GradScalerOptions options;
  options.init_scale = draw.chance(50) ? 8 : 512;
  options.growth_interval = 1 + draw.below(2);
  options.hysteresis = 1 + draw.below(2);
  options.consecutive_hysteresis = draw.chance(50);
  options.enabled = draw.chance(90);
  return options;
}

/// The loss of all ranks, or of one of them, is infinite: no rank steps.
Tensor overflowing(Turn& turn, const Tensor& loss) {
  const auto& context = process_context();
  const bool on_all = turn.draw.chance(50);
  const auto rank = turn.draw.below(context.world_size());
  const bool here = !turn.side.sharded || on_all || context.rank() == rank;
  return here ? loss * std::numeric_limits<double>::infinity() : loss;
}

/// A new process goes on with a scaler that was saved.
void resume(GradScaler& from, GradScaler& to) {
  auto target = state_dict(to);
  load_state_dict(target, state_dict(from));
}

bool has_gradients(const torch::optim::Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      if (parameter.grad().defined()) return true;
    }
  }
  return false;
}

void step_with(Turn& turn, GradScaler& scaler, bool overflows) {
  auto& trainee = turn.trainee;
  const bool unscales = turn.draw.chance(50), clips = turn.draw.chance(50);
  trainee.optimizer->zero_grad();
  auto loss = random_loss(turn, {}, /*may_recompute=*/true);
  turn.side.record_mean(loss);
  if (overflows) loss = overflowing(turn, loss);
  backward(scaler.scale(loss));
  if (!has_gradients(*trainee.optimizer)) return;
  if (unscales) scaler.unscale_(*trainee.optimizer);
  if (unscales && clips && !overflows && trainee.model->is_double()) clip_grad_norm_(trainee.model->parameters(), 0.7);
  turn.side.recorded.push_back({scaler.step(*trainee.optimizer) ? 1.0 : 0.0, false});
  scaler.update();
  turn.side.recorded.push_back({scaler.get_scale(), false});
}

void train_with_a_scaler(Turn& turn) {
  const auto options = random_scaler(turn.draw);
  const int64_t steps = 1 + turn.draw.below(3), resumes_at = turn.draw.below(5), overflow_at = turn.draw.below(5);
  GradScaler first(options), second(options);
  auto* scaler = &first;
  for (int64_t step = 0; step < steps; ++step) {
    if (step == resumes_at) {
      resume(first, second);
      scaler = &second;
    }
    step_with(turn, *scaler, options.enabled && step == overflow_at);
    turn.trainee.model->zero_grad();
  }
}

} // namespace

std::vector<Action> scaling_actions() { return {{"train with a scaler", 8, When::kReduced, train_with_a_scaler}}; }

} // namespace tessera::testing::scripts
