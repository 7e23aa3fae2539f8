// What looks at a training and leaves it as it is.
#include <tessera/collectives/process_context.h>
#include <tessera/fsdp/explain.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/summary.h>
#include <tessera/training/nan_guard.h>

#include <tessera/tests/fsdp/scripts/action.h>
#include <tessera/tests/fsdp/scripts/pass.h>

namespace tessera::testing::scripts {
namespace {

void pass(Turn& turn) {
  const auto loss = random_loss(turn, {}, /*may_recompute=*/true);
  turn.side.record_mean(loss);
  backward(loss);
}

/// The groups are not all that gathers and reduces.
void check_within(const Traffic& reported, CollectiveKind kind, const Traffic& before) {
  const auto now = process_context().count(kind);
  TORCH_CHECK(reported.calls <= now.calls - before.calls && reported.bytes <= now.bytes - before.bytes, "the report has ",
              reported.calls, " calls of ", to_string(kind), " with ", reported.bytes, " bytes, but there were ",
              now.calls - before.calls, " with ", now.bytes - before.bytes);
}

void report(Turn& turn) {
  if (!turn.side.sharded) return pass(turn);
  auto module = fsdp(*turn.trainee.model);
  const auto gathers = process_context().count(CollectiveKind::kAllGather);
  const auto scatters = process_context().count(CollectiveKind::kReduceScatter);
  const auto sums = process_context().count(CollectiveKind::kAllReduce);
  module.set_reporting(true);
  pass(turn);
  const auto told = module.report();
  check_within(told.all_gathers(), CollectiveKind::kAllGather, gathers);
  check_within(told.reduce_scatters(), CollectiveKind::kReduceScatter, scatters);
  check_within(told.all_reduces(), CollectiveKind::kAllReduce, sums);
  for (const auto& group : told.groups)
    TORCH_CHECK(told.to_string().find(group.name) != std::string::npos, "the report does not name ", group.name);
}

void stop_reporting(Turn& turn) {
  if (turn.side.sharded) fsdp(*turn.trainee.model).set_reporting(false);
}

void explain_model(Turn& turn) {
  if (!turn.side.sharded) return;
  const auto told = explain(*turn.trainee.model, {.activation_bytes = 1000});
  const auto table = summary(*turn.trainee.model);
  TORCH_CHECK(table.parameters.size() >= distinct(turn.trainee.model->parameters()).size(), "summed up as:\n", table);
  TORCH_CHECK(!told.groups.empty() && told.memory.peak >= told.memory.parameters + told.memory.buffers, "explained as:\n", told);
}

/// What the guard says is not compared: sums of buffers read what lies between the parameters, which nobody has written.
void guard_against_nan(Turn& turn) {
  if (!turn.side.sharded) return pass(turn);
  NanGuard guard(*turn.trainee.model);
  pass(turn);
  try {
    guard.check();
  } catch (const c10::Error& error) {
    turn.note(error.what_without_backtrace());
  }
}

} // namespace

std::vector<Action> observation_actions() {
  return {{"report", 4, When::kAnywhere, report},
          {"stop reporting", 1, When::kBetweenSteps, stop_reporting},
          {"explain", 2, When::kAnywhere, explain_model},
          {"guard against NaN", 3, When::kBetweenSteps, guard_against_nan}};
}

} // namespace tessera::testing::scripts
