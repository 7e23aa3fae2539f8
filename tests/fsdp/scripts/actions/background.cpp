// Checkpoints that are written while the training goes on.
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/checkpointer.h>

#include <optional>

#include <tessera/tests/fsdp/scripts/action.h>
#include <tessera/tests/fsdp/scripts/actions/saved_state.h>
#include <tessera/tests/fsdp/scripts/pass.h>

namespace tessera::testing::scripts {
namespace {

/// What a trainee held at one point: on the sharded side in a checkpoint, of which a thread may still write.
struct Kept {
  std::filesystem::path folder;
  std::optional<StateDict> in_memory;
};

StateDict state_of_training(Trainee& trainee) { return state_dict(*trainee.model, *trainee.optimizer); }

Kept keep(Turn& turn, std::optional<checkpoint::Checkpointer>& checkpointer) {
  Kept kept{turn.side.folder / ("b-" + std::to_string(turn.draw.seed())), {}};
  if (turn.side.sharded) {
    if (!checkpointer) checkpointer.emplace();
    checkpointer->save(state_of_training(turn.trainee), kept.folder, {.update_latest = false});
  } else {
    kept.in_memory = state_dict(*turn.trainee.model, *turn.trainee.optimizer, {.cpu_offload = true});
  }
  return kept;
}

void bring_back(Turn& turn, const Kept& kept) {
  if (kept.in_memory) {
    load_state_dict(*turn.trainee.model, *turn.trainee.optimizer, *kept.in_memory);
  } else {
    checkpoint::load(state_of_training(turn.trainee), kept.folder);
  }
}

void train_on(Turn& turn) {
  const auto loss = random_loss(turn, {}, /*may_recompute=*/true);
  turn.side.record_mean(loss);
  backward(loss);
  turn.trainee.optimizer->step();
  turn.trainee.optimizer->zero_grad();
}

/// Twice, so that the second save waits for the first, and has its memory. Then one of the two comes back.
void save_in_the_background(Turn& turn) {
  if (has_complex_parameters(*turn.trainee.model)) return;
  const bool takes_first = turn.draw.chance(50), waits_between = turn.draw.chance(20);
  std::optional<checkpoint::Checkpointer> checkpointer;
  const auto first = keep(turn, checkpointer);
  train_on(turn);
  if (waits_between && checkpointer) checkpointer->wait();
  const auto second = keep(turn, checkpointer);
  train_on(turn);
  interrupt(turn);
  if (checkpointer) checkpointer->wait();
  bring_back(turn, takes_first ? first : second);
}

} // namespace

std::vector<Action> background_actions() { return {{"save in the background", 3, When::kReduced, save_in_the_background}}; }

} // namespace tessera::testing::scripts
