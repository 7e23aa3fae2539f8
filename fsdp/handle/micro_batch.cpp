#include <tessera/fsdp/micro_batch.h>

#include <absl/container/flat_hash_set.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <utility>

#include <tessera/base/error_text.h>
#include <tessera/collectives/process_context.h>
#include <tessera/fsdp/model/foreign_groups.h>
#include <tessera/fsdp/model/sharded_module.h>
#include <tessera/fsdp/schedule/micro_batches.h>

namespace tessera {

namespace {

using SchedulePtr = std::shared_ptr<internal::Schedule>;

/// The schedules of the models in `module`, in an order that is the same on all ranks. An error where one has modules elsewhere,
/// or may not begin `phase`.
std::vector<SchedulePtr> schedules_in(const torch::nn::Module& module, const MicroBatch& phase) {
  const auto states = internal::sharded_within(module, "micro_batch_scope");
  std::vector<SchedulePtr> schedules;
  absl::flat_hash_set<const internal::Schedule*> seen;
  for (const auto& state : states) {
    const auto& schedule = state->schedule();
    if (!seen.insert(schedule.get()).second) continue;
    const auto root = state->root();
    TORCH_CHECK_VALUE(std::find(states.begin(), states.end(), root) != states.end(), "micro_batch_scope: the module ",
                      state->label(), " is a part of the model ", root->label(), ", whose step is one: take the whole model");
    const auto refusal = schedule->refusal_of(phase);
    TORCH_CHECK(refusal.empty(), "micro_batch_scope of ", root->label(), ": ", internal::to_string(phase), " ", refusal,
                " (rank ", process_context().rank(), ")");
    schedules.push_back(schedule);
  }
  internal::check_owns_all_parameters(module, "micro_batch_scope", seen);
  return schedules;
}

} // namespace

MicroBatchScope::MicroBatchScope(const torch::nn::Module& module, const MicroBatch& micro_batch)
    : exceptions_(std::uncaught_exceptions()) {
  try {
    for (auto& schedule : schedules_in(module, micro_batch)) {
      schedules_.push_back(std::move(schedule));
      schedules_.back()->begin_phase(micro_batch);
    }
  } catch (...) {
    end(/*has_failed=*/true);
    throw;
  }
}

MicroBatchScope::~MicroBatchScope() { end(std::uncaught_exceptions() > exceptions_); }

void MicroBatchScope::end(bool has_failed) {
  for (const auto& schedule : schedules_) {
    try {
      schedule->end_phase(has_failed);
    } catch (...) { // of a reduction, or of a hook on a gradient
      schedule->refuse("the end of a phase failed: " + internal::error_text(std::current_exception()));
    }
  }
}

void gather_ahead(const torch::nn::Module& module, MicroBatchPhase phase) {
  absl::flat_hash_set<const internal::Schedule*> seen;
  for (const auto& state : internal::sharded_within(module, "gather_ahead")) {
    const auto& schedule = state->schedule();
    if (seen.insert(schedule.get()).second) schedule->expect_phase(phase);
  }
}

} // namespace tessera
