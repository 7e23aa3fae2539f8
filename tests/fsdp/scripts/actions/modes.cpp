// Training and evaluation modes of modules.
#include <tessera/tests/fsdp/scripts/action.h>
#include <tessera/tests/fsdp/scripts/pass.h>

namespace tessera::testing::scripts {
namespace {

/// The whole model's, or that of one of its modules, which stays so.
void set_mode(Turn& turn) {
  const auto modules = turn.trainee.model->modules();
  const auto& module = turn.draw.chance(50) ? modules.front() : turn.draw.of(modules);
  const bool trains = turn.draw.chance(60);
  turn.note(module->name() + (trains ? " trains" : " evaluates"));
  module->train(trains);
}

/// An evaluation in the middle of a training.
void evaluate_in_its_mode(Turn& turn) {
  const auto modules = turn.trainee.model->modules();
  std::vector<bool> before;
  for (const auto& module : modules) before.push_back(module->is_training());
  turn.trainee.model->eval();
  {
    const torch::NoGradGuard no_grad;
    turn.side.record_mean(random_loss(turn));
  }
  for (size_t i = 0; i < modules.size(); ++i) modules[i]->train(before[i]); // from the outer to the inner
}

} // namespace

std::vector<Action> mode_actions() {
  return {{"set the mode", 4, When::kBetweenSteps, set_mode},
          {"evaluate in its mode", 4, When::kBetweenSteps, evaluate_in_its_mode}};
}

} // namespace tessera::testing::scripts
