#include "action.h"

#include <algorithm>
#include <iterator>
#include <numeric>

#include <tessera/tests/fsdp/scripts/replay.h>

namespace tessera::testing::scripts {

const std::vector<Action>& actions() {
  static const std::vector<Action> all = [] {
    std::vector<Action> joined;
    for (const auto& part : {training_actions(),     graph_actions(),
                             accumulation_actions(), failure_actions(),
                             evaluation_actions(),   write_actions(),
                             gradient_actions(),     optimizer_actions(),
                             state_actions(),        checkpoint_actions(),
                             average_actions(),      loop_actions(),
                             schedule_actions(),     sharding_actions(),
                             surgery_actions(),      observation_actions(),
                             background_actions(),   mode_actions(),
                             scaling_actions(),      closure_actions(),
                             reduction_actions(),    thread_actions(),
                             post_hook_actions(),    recomputation_actions(),
                             row_edit_actions(),     several_optimizers_actions(),
                             expert_actions()})
      joined.insert(joined.end(), part.begin(), part.end());
    return joined;
  }();
  return all;
}

const Action& random_action(Draw& draw, const std::vector<Action>& from) {
  const auto add = [](int64_t sum, const Action& action) { return sum + action.weight; };
  int64_t left = draw.below(std::accumulate(from.begin(), from.end(), int64_t{0}, add));
  const auto chosen = std::find_if(from.begin(), from.end(), [&](const Action& action) { return (left -= action.weight) < 0; });
  return *chosen;
}

void interrupt(Turn& turn) {
  static const std::vector<Action> candidates = [] {
    std::vector<Action> chosen;
    std::copy_if(actions().begin(), actions().end(), std::back_inserter(chosen),
                 [](const Action& action) { return action.when == When::kAnywhere; });
    return chosen;
  }();
  if (turn.depth >= 2 || !turn.draw.chance(30)) return;
  const auto& action = random_action(turn.draw, candidates);
  const bool on_other = turn.draw.chance(50);
  const auto seed = turn.draw.seed();
  Draw draw(seed);
  if (Replay::from_environment().leaves_out(action.name)) return;
  turn.note("within: " + action.name + (on_other ? " of the other model" : ""));
  Turn inner{turn.side, on_other ? turn.other : turn.trainee, on_other ? turn.trainee : turn.other, draw, turn.depth + 1};
  turn.side.streams.run(seed, [&] { action.run(inner); });
}

} // namespace tessera::testing::scripts
