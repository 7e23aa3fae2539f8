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

Traffic plus(const Traffic& a, const Traffic& b) { return {a.calls + b.calls, a.bytes + b.bytes}; }
Traffic minus(const Traffic& a, const Traffic& b) { return {a.calls - b.calls, a.bytes - b.bytes}; }

/// The groups are not all that gathers and reduces.
void check_within(const Traffic& reported, const char* what, const Traffic& sent) {
  TORCH_CHECK(reported.calls <= sent.calls && reported.bytes <= sent.bytes, "the report has ", reported.calls, " calls of ", what,
              " with ", reported.bytes, " bytes, but there were ", sent.calls, " with ", sent.bytes);
}

/// What reductions may call: in messages they exchange and gather.
Traffic sent_by_reductions() {
  const auto& context = process_context();
  return plus(plus(context.count(CollectiveKind::kReduceScatter), context.count(CollectiveKind::kAllReduce)),
              context.count(CollectiveKind::kAllToAll));
}

void report(Turn& turn) {
  if (!turn.side.sharded) return pass(turn);
  auto module = fsdp(*turn.trainee.model);
  const auto gathers = process_context().count(CollectiveKind::kAllGather), reductions = sent_by_reductions();
  module.set_reporting(true);
  pass(turn);
  const auto told = module.report();
  const auto gathered = minus(process_context().count(CollectiveKind::kAllGather), gathers);
  check_within(told.all_gathers(), "all_gather", gathered);
  if (turn.trainee.is_last_backward) // otherwise messages that were reported are still to be sent
    check_within(plus(told.reduce_scatters(), told.all_reduces()), "reductions",
                 plus(minus(sent_by_reductions(), reductions), minus(gathered, told.all_gathers())));
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
