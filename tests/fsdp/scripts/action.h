#pragma once

#include <functional>
#include <string>
#include <vector>

#include <tessera/tests/fsdp/scripts/side.h>

namespace tessera::testing::scripts {

/// Where an action may stand in a script.
enum class When {
  kAnywhere,     ///< also between a forward and its backward, and in a hook of a backward
  kBetweenSteps, ///< also while gradients wait for their reduction
  kReduced,      ///< where all gradients are in grad(): it reads or changes them
};

/// Something that a training program does with a model. It runs on both sides, and then losses, gradients, parameters, and
/// whether it threw are compared.
struct Action {
  std::string name;
  int64_t weight; ///< how often it is drawn, relative to the others
  When when;
  std::function<void(Turn&)> run;
};

/// The actions of one file each.
std::vector<Action> training_actions();
std::vector<Action> graph_actions();
std::vector<Action> accumulation_actions();
std::vector<Action> failure_actions();
std::vector<Action> evaluation_actions();
std::vector<Action> write_actions();
std::vector<Action> row_edit_actions();
std::vector<Action> gradient_actions();
std::vector<Action> optimizer_actions();
std::vector<Action> state_actions();
std::vector<Action> checkpoint_actions();
std::vector<Action> average_actions();
std::vector<Action> loop_actions();
std::vector<Action> schedule_actions();
std::vector<Action> sharding_actions();
std::vector<Action> surgery_actions();
std::vector<Action> observation_actions();
std::vector<Action> background_actions();
std::vector<Action> mode_actions();
std::vector<Action> scaling_actions();
std::vector<Action> closure_actions();
std::vector<Action> reduction_actions();
std::vector<Action> thread_actions();
std::vector<Action> post_hook_actions();
std::vector<Action> recomputation_actions();
std::vector<Action> several_optimizers_actions();
std::vector<Action> expert_actions();
/// Of the scripts of parallel models alone.
std::vector<Action> parallel_actions();

/// All others: the table that scripts are drawn from.
const std::vector<Action>& actions();
const Action& random_action(Draw& draw, const std::vector<Action>& from);

/// Sometimes runs an action that may stand anywhere. Actions call it where another program might do something else.
void interrupt(Turn& turn);

} // namespace tessera::testing::scripts
