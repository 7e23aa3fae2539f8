// Gradients that are reduced later.
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/micro_batch.h>
#include <tessera/fsdp/no_sync.h>

#include <memory>
#include <utility>
#include <vector>

#include <tessera/tests/fsdp/scripts/action.h>
#include <tessera/tests/fsdp/scripts/pass.h>

namespace tessera::testing::scripts {
namespace {

void backward_a_few_times(Turn& turn) {
  turn.trainee.gradients_wait = true;
  const int64_t times = 1 + turn.draw.below(3);
  for (int64_t i = 0; i < times; ++i) {
    const auto loss = random_loss(turn);
    turn.side.record_mean(loss);
    interrupt(turn);
    backward(loss);
  }
}

/// Turns a setting of the model, or of one of its modules, off for a few backwards.
template <typename Set>
void accumulate(Turn& turn, const Set& set) {
  const auto modules = turn.trainee.model->modules();
  const auto one = turn.draw.chance(50) ? modules.front() : turn.draw.of(modules);
  const bool recurse = turn.draw.chance(50);
  const bool applies = turn.side.sharded && is_sharded(*one);
  if (applies) set(fsdp(*one), false, recurse);
  backward_a_few_times(turn);
  if (applies) set(fsdp(*one), true, recurse);
}

void without_sync(Turn& turn) {
  accumulate(turn, [](FSDPModule module, bool on, bool recurse) { module.set_requires_gradient_sync(on, recurse); });
}

/// As in FSDP2, switching the sync on switches the all-reduce on as well.
void without_all_reduce(Turn& turn) {
  const bool by_sync = turn.draw.chance(50);
  accumulate(turn, [by_sync](FSDPModule module, bool on, bool recurse) {
    if (on && by_sync) {
      module.set_requires_gradient_sync(true, recurse);
    } else {
      module.set_requires_all_reduce(on, recurse);
    }
  });
}

void in_a_no_sync_scope(Turn& turn) {
  const auto modules = turn.trainee.model->modules();
  const auto one = turn.draw.chance(50) ? modules.front() : turn.draw.of(modules);
  std::optional<NoSync> scope;
  if (turn.side.sharded && is_sharded(*one)) scope.emplace(*one);
  backward_a_few_times(turn);
  if (!turn.draw.chance(40)) return;
  std::optional<NoSync> next; // begins before the other ends
  if (scope) next.emplace(*one);
  scope.reset();
  backward_a_few_times(turn);
}

void before_the_last_backward(Turn& turn) {
  set_is_last_backward(turn, false);
  backward_a_few_times(turn);
  set_is_last_backward(turn, true);
}

/// Forwards, of which several may be in flight, and their backwards in any order.
void in_micro_batches(Turn& turn) {
  const auto residency = turn.draw.chance(50) ? Residency::kStage : Residency::kMicroBatch;
  const auto scope_of = [&](const MicroBatch& phase) {
    return turn.side.sharded ? std::make_unique<MicroBatchScope>(*turn.trainee.model, phase) : nullptr;
  };
  if (turn.trainee.policy) turn.trainee.gradients_wait = true; // the emulation reduces in each backward
  std::vector<std::pair<int64_t, Tensor>> in_flight;
  for (int64_t next = 0, count = 1 + turn.draw.below(3); next < count || !in_flight.empty();) {
    if (next < count && (in_flight.empty() || turn.draw.chance(50))) {
      const auto scope = scope_of({.index = next, .residency = residency});
      in_flight.emplace_back(next++, random_loss(turn));
      turn.side.record_mean(in_flight.back().second);
      continue;
    }
    const auto done = in_flight.begin() + turn.draw.below(static_cast<int64_t>(in_flight.size()));
    const bool is_last = next == count && in_flight.size() == 1;
    const auto scope =
        scope_of({.index = done->first, .phase = MicroBatchPhase::kBackward, .is_last = is_last, .residency = residency});
    backward(done->second);
    in_flight.erase(done);
  }
}

} // namespace

std::vector<Action> accumulation_actions() {
  return {{"without sync", 12, When::kBetweenSteps, without_sync},
          {"in a no_sync scope", 8, When::kBetweenSteps, in_a_no_sync_scope},
          {"without all-reduce", 6, When::kBetweenSteps, without_all_reduce},
          {"before the last backward", 6, When::kBetweenSteps, before_the_last_backward},
          {"in micro-batches", 6, When::kBetweenSteps, in_micro_batches}};
}

} // namespace tessera::testing::scripts
