// Several optimizers of one model, each with parameters of its own, that are stepped and zeroed apart.
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/optim/step.h>

#include <tessera/tests/fsdp/scripts/action.h>
#include <tessera/tests/fsdp/scripts/actions/saved_state.h>
#include <tessera/tests/fsdp/scripts/pass.h>

namespace tessera::testing::scripts {
namespace {

/// The parameters are dealt out in turn.
std::vector<Tensor> share_of(const std::vector<Tensor>& all, size_t number, size_t count) {
  std::vector<Tensor> share;
  for (size_t i = number; i < all.size(); i += count) share.push_back(all[i]);
  return share;
}

/// Those that the trainee has, or new ones of different kinds.
std::vector<std::unique_ptr<torch::optim::Optimizer>>& optimizers_of(Turn& turn) {
  auto& optimizers = turn.trainee.several;
  const auto count = static_cast<size_t>(2 + turn.draw.below(2));
  std::vector<OptimizerPlan> plans;
  for (size_t i = 0; i < count; ++i) plans.emplace_back(turn.draw);
  if (!optimizers.empty()) return optimizers;
  const auto parameters = distinct(turn.trainee.model->parameters());
  for (size_t i = 0; i < std::min(count, parameters.size()); ++i) {
    optimizers.push_back(plans[i].over(share_of(parameters, i, count)));
    turn.note("one more: " + plans[i].name());
  }
  return optimizers;
}

std::vector<NamedOptimizer> named(const std::vector<std::unique_ptr<torch::optim::Optimizer>>& optimizers) {
  std::vector<NamedOptimizer> all;
  for (const auto& each : optimizers) all.push_back({"number" + std::to_string(all.size()), *each});
  return all;
}

void train_with_several(Turn& turn) {
  auto& optimizers = optimizers_of(turn);
  const int64_t steps = 1 + turn.draw.below(3);
  for (int64_t step = 0; step < steps; ++step) {
    for (const auto& each : optimizers) {
      const bool zeroes = turn.draw.chance(70), to_none = turn.draw.chance(60);
      if (zeroes) each->zero_grad(to_none);
    }
    const auto loss = random_loss(turn); // not recomputed: what is done before the backward may write parameters
    turn.side.record_mean(loss);
    interrupt(turn);
    backward(loss);
    for (const auto& each : optimizers) {
      const bool steps_now = turn.draw.chance(70), by_function = turn.draw.chance(50);
      if (steps_now) by_function ? tessera::step(*each) : each->step();
    }
  }
}

/// One of them goes on from where it was, and so do the weights: in memory, or on the sharded side by a checkpoint.
void go_back_with_several(Turn& turn) {
  auto& optimizers = optimizers_of(turn);
  auto& model = *turn.trainee.model;
  const bool in_memory = turn.draw.chance(50) || has_complex_parameters(model);
  const auto folder = turn.side.folder / ("s-" + std::to_string(turn.draw.seed()));
  const auto all = named(optimizers);
  const bool saves = turn.side.sharded && !in_memory;
  StateDict kept;
  if (saves) {
    checkpoint::save(state_dict(model, all), folder, {.update_latest = false});
  } else {
    kept = state_dict(model, all, {.cpu_offload = true});
  }
  train_with_several(turn);
  if (saves) {
    checkpoint::load(state_dict(model, all), folder);
  } else {
    load_state_dict(model, all, kept);
  }
}

} // namespace

std::vector<Action> several_optimizers_actions() {
  return {{"train with several optimizers", 5, When::kReduced, train_with_several},
          {"go back with several optimizers", 2, When::kReduced, go_back_with_several}};
}

} // namespace tessera::testing::scripts
