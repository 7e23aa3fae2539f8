// Steps that compute the loss themselves.
#include <tessera/checkpoint/state_dict.h>
#include <tessera/collectives/process_context.h>
#include <tessera/optim/step.h>
#include <tessera/training/metrics.h>

#include <tessera/tests/fsdp/scripts/action.h>
#include <tessera/tests/fsdp/scripts/pass.h>

namespace tessera::testing::scripts {
namespace {

void step_with_a_closure(Turn& turn) {
  auto& optimizer = *turn.trainee.optimizer;
  const bool by_function = turn.draw.chance(50);
  const auto closure = [&] {
    optimizer.zero_grad();
    auto loss = random_loss(turn, {}, /*may_recompute=*/true);
    backward(loss);
    return loss.detach();
  };
  turn.side.record_mean(by_function ? tessera::step(optimizer, closure) : optimizer.step(closure));
}

/// What LBFGS may train: it has one vector for all of it.
std::vector<Tensor> parameters_for_lbfgs(const RandomModel& model) {
  auto parameters = distinct(model.parameters());
  std::erase_if(parameters, [](const Tensor& each) { return !each.requires_grad() || each.scalar_type() != torch::kDouble; });
  return parameters;
}

/// Short steps, and few: more of them amplify the rounding of a sum over ranks.
torch::optim::LBFGSOptions random_lbfgs(Draw& draw) {
  torch::optim::LBFGSOptions options(0.1);
  options.max_iter(2).history_size(2);
  if (draw.chance(30)) options.line_search_fn("strong_wolfe");
  return options;
}

/// Some steps by LBFGS, on other rows each, with what it remembers taken back in between. Its line of steps would amplify what is
/// rounded to float.
void minimize(Turn& turn) {
  auto& trainee = turn.trainee;
  const auto options = random_lbfgs(turn.draw);
  const auto seed = turn.draw.seed();
  const auto steps = static_cast<uint64_t>(1 + turn.draw.below(2)), goes_back_at = static_cast<uint64_t>(turn.draw.below(4));
  const auto squares = turn.draw.chance(75) ? Squares::kBounded : Squares::kAsTheyAre; // a step that goes too far ends no script
  const auto parameters = parameters_for_lbfgs(*trainee.model);
  if (!trainee.is_exact || parameters.empty() || !trainee.on_one_mesh) return;
  torch::optim::LBFGS optimizer(parameters, options);
  const auto mesh = init_device_mesh(test_device_type(), {process_context().world_size()});
  StateDict before;
  for (uint64_t step = 0; step < steps; ++step) {
    if (step == goes_back_at) before = state_dict(*trainee.model, optimizer, {.cpu_offload = true});
    turn.side.record(optimizer.step([&] {
      optimizer.zero_grad();
      const auto loss = whole_loss(turn.side, trainee, seed + step, squares);
      backward(loss);
      return turn.side.sharded ? all_reduce(loss.detach(), mesh, ReduceOp::kAvg) : loss.detach();
    }));
    if (step == goes_back_at) load_state_dict(*trainee.model, optimizer, before);
  }
}

} // namespace

std::vector<Action> closure_actions() {
  return {{"step with a closure", 5, When::kReduced, step_with_a_closure}, {"minimize", 3, When::kReduced, minimize}};
}

} // namespace tessera::testing::scripts
