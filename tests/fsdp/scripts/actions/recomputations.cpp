// Several graphs whose blocks run once more in backward, or whose saved tensors lie elsewhere, with nothing else in between.
#include <tessera/fsdp/fully_shard.h>

#include <tessera/tests/fsdp/scripts/action.h>
#include <tessera/tests/fsdp/scripts/pass.h>

namespace tessera::testing::scripts {
namespace {

Tensor loss_at_once(Turn& turn) {
  auto loss = random_loss(turn, {}, /*may_recompute=*/true, /*may_mix_dtensors=*/false);
  turn.side.record_mean(loss);
  return loss;
}

std::vector<Tensor> random_inputs(Turn& turn) {
  std::vector<Tensor> inputs;
  for (const auto& parameter : turn.trainee.model->parameters()) {
    const bool chosen = turn.draw.chance(50);
    if (chosen && parameter.requires_grad()) inputs.push_back(parameter);
  }
  return inputs;
}

void recomputed_backwards(Turn& turn) {
  const auto kind = turn.draw.below(5);
  const auto inputs = random_inputs(turn);
  const auto first = loss_at_once(turn), second = loss_at_once(turn);
  switch (kind) {
    case 0: return backward(first + second);
    case 1: backward(second); return backward(first);
    case 2: backward(first, /*retain_graph=*/true); return backward(first + second);
    case 3: backward(second, /*retain_graph=*/false, inputs); return backward(first);
    default: backward(first);
  }
}

/// The first of them reduces nothing.
void recomputed_accumulation(Turn& turn) {
  const bool by_last = turn.draw.chance(50);
  const auto set = [&](bool on) {
    if (by_last) return set_is_last_backward(turn, on);
    if (turn.side.sharded) fsdp(*turn.trainee.model).set_requires_gradient_sync(on);
  };
  turn.trainee.gradients_wait = true;
  set(false);
  backward(loss_at_once(turn));
  set(true);
  backward(loss_at_once(turn));
}

} // namespace

std::vector<Action> recomputation_actions() {
  return {{"recomputed backwards", 8, When::kBetweenSteps, recomputed_backwards},
          {"recomputed accumulation", 4, When::kBetweenSteps, recomputed_accumulation}};
}

} // namespace tessera::testing::scripts
