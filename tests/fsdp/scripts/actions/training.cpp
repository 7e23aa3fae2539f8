// The plain course of a training.
#include <tessera/optim/step.h>

#include <string>

#include <tessera/tests/fsdp/scripts/action.h>
#include <tessera/tests/fsdp/scripts/compare.h>
#include <tessera/tests/fsdp/scripts/pass.h>

namespace tessera::testing::scripts {
namespace {

/// By the function that takes it group by group where the state lies in files, or by the optimizer's own.
void step(Turn& turn) {
  auto& optimizer = *turn.trainee.optimizer;
  turn.draw.chance(70) ? tessera::step(optimizer) : optimizer.step();
}

void train(Turn& turn) {
  const int64_t steps = 1 + turn.draw.below(3);
  for (int64_t done = 0; done < steps; ++done) {
    turn.trainee.optimizer->zero_grad(turn.draw.chance(70));
    const auto loss = random_loss(turn, {}, /*may_recompute=*/true);
    turn.side.record_mean(loss);
    backward(loss);
    step(turn);
  }
}

void forward_and_backward(Turn& turn) {
  const auto loss = random_loss(turn);
  turn.side.record_mean(loss);
  interrupt(turn);
  backward(loss);
}

/// Where the blocks of one rank end with an error, all ranks do: the others would wait for it in their backward.
Tensor forward_apart(Turn& turn) {
  Tensor loss;
  std::string error;
  try {
    loss = loss_of_ranks_apart(turn);
  } catch (const c10::Error& failure) {
    error = failure.what_without_backtrace();
  }
  TORCH_CHECK(sum_over_ranks(!error.empty()) == 0, "the forward of a rank failed", error.empty() ? "" : ": ", error);
  return loss;
}

/// Every rank uses the head. Batch statistics would be of all ranks' blocks.
void train_apart(Turn& turn) {
  const auto& model = *turn.trainee.model;
  if (!turn.trainee.is_replica || !model.head().requires_grad() || !model.buffers().empty() || model.has_inner_backward()) return;
  const auto loss = forward_apart(turn);
  turn.side.record_mean(loss);
  backward(loss);
}

void forward_alone(Turn& turn) { turn.side.record_mean(random_loss(turn)); }

} // namespace

std::vector<Action> training_actions() {
  return {{"train", 30, When::kReduced, train},
          {"backward", 30, When::kAnywhere, forward_and_backward},
          {"ranks apart", 15, When::kBetweenSteps, train_apart},
          {"forward alone", 5, When::kAnywhere, forward_alone},
          {"step", 30, When::kReduced, step}};
}

} // namespace tessera::testing::scripts
