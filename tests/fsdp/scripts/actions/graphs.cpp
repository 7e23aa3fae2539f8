// Several graphs, graphs used twice, parts of graphs, and programs inside a backward.
#include <tessera/tests/fsdp/scripts/action.h>
#include <tessera/tests/fsdp/scripts/pass.h>

#include <algorithm>

namespace tessera::testing::scripts {
namespace {

std::vector<Tensor> several_losses(Turn& turn) {
  std::vector<Tensor> losses;
  const int64_t count = 2 + turn.draw.below(2);
  for (int64_t i = 0; i < count; ++i) {
    losses.push_back(random_loss(turn));
    turn.side.record_mean(losses.back());
    interrupt(turn);
  }
  return losses;
}

void backward_of_sum(Turn& turn) {
  auto sum = torch::zeros({});
  for (const auto& loss : several_losses(turn)) sum = sum + loss;
  backward(sum);
}

void backward_of_list(Turn& turn) {
  std::vector<Tensor> losses;
  for (const auto& loss : several_losses(turn)) {
    if (loss.requires_grad()) losses.push_back(loss);
  }
  EmulatedPolicy::refresh_all();
  if (!losses.empty()) torch::autograd::backward(losses);
}

void backward_of_each(Turn& turn) {
  auto losses = several_losses(turn);
  if (turn.draw.chance(50)) std::reverse(losses.begin(), losses.end());
  for (const auto& loss : losses) {
    backward(loss);
    interrupt(turn);
  }
}

void retained_graph(Turn& turn) {
  const auto loss = random_loss(turn);
  turn.side.record_mean(loss);
  interrupt(turn);
  backward(loss, /*retain_graph=*/true);
  interrupt(turn);
  backward(loss);
}

void backward_over_inputs(Turn& turn) {
  std::vector<Tensor> inputs;
  for (const auto& parameter : turn.trainee.model->parameters()) {
    const bool chosen = turn.draw.chance(50);
    if (chosen && parameter.requires_grad()) inputs.push_back(parameter);
  }
  const auto loss = random_loss(turn, {}, /*may_recompute=*/false, /*may_mix_dtensors=*/false); // whose gradients are no inputs'
  turn.side.record_mean(loss);
  interrupt(turn);
  backward(loss, /*retain_graph=*/false, inputs);
}

/// Another program runs inside a hook of an activation, and the hook changes the gradient.
void acts_in_hook(Turn& turn) {
  const auto at = static_cast<size_t>(turn.draw.below(4));
  const auto seed = turn.draw.seed();
  if (turn.trainee.policy) return; // it would act once for each rank
  const auto act = [&turn, seed](const Tensor& gradient) {
    const torch::AutoGradMode grad_mode(true);
    Draw draw(seed);
    Turn inner{turn.side, turn.trainee, turn.other, draw, turn.depth};
    interrupt(inner);
    interrupt(inner);
    return gradient.detach() * 0.5;
  };
  const auto loss = random_loss(turn, [&](size_t position, const Tensor& x) {
    if (position != at || !x.requires_grad()) return x;
    auto y = x * 1.0;
    y.register_hook(act);
    return y;
  });
  turn.side.record_mean(loss);
  backward(loss);
}

} // namespace

std::vector<Action> graph_actions() {
  return {{"backward of a sum", 4, When::kBetweenSteps, backward_of_sum},
          {"backward of a list", 4, When::kBetweenSteps, backward_of_list},
          {"backward of each", 6, When::kBetweenSteps, backward_of_each},
          {"retained graph", 6, When::kBetweenSteps, retained_graph},
          {"backward over inputs", 5, When::kBetweenSteps, backward_over_inputs},
          {"acts in a hook", 8, When::kBetweenSteps, acts_in_hook}};
}

} // namespace tessera::testing::scripts
