// Which groups are reduced, and when.

#include <tessera/fsdp/schedule/step.h>

#include <algorithm>
#include <functional>

namespace tessera::internal {

/// Once in a backward: those that it leaves out are reduced as what this rank does not use.
void Step::join_buckets(size_t landed) {
  const auto& module = notes_[landed].place.module;
  if (notes_[landed].joined_phase == phase_) return;
  for (size_t each = module.first; each < module.end; ++each) {
    notes_[each].joined_phase = phase_;
    if (!exists(each)) continue;
    groups_.join_reduction(each);
    reductions_.add_unfinished(each);
  }
}

/// `landed` has the gradient that came last.
void Step::reduce_after(size_t landed) {
  for (auto& next = next_to_reduce_; next >= 0; --next) {
    const size_t group = reads_.order()[static_cast<size_t>(next)];
    if (!exists(group) || !(notes_[group].place.module.has_buckets() || groups_.expects_any(group))) continue;
    if (may_join(group)) return;
    const bool is_passed = reads_.position_of(landed) < next && !awaits_gradients(group);
    if (!is_ready(group) && !is_passed) return; // its turn comes first on every rank
    if (groups_.has_pending(group)) finish_group(group);
  }
}

/// A loss that uses only some of what a forward read leaves out the other gradients, and a torch::autograd::Function brings some
/// that no read foretold. A backward inside this one's graph task cannot tell.
bool Step::awaits_gradients(size_t group) const { return groups_.is_in_inner_backward() || groups_.awaits_any(group); }

/// A bucket whose module has had no gradient in this backward yet, and will.
bool Step::may_join(size_t group) const {
  const auto& module = notes_[group].place.module;
  if (!module.has_buckets() || notes_[group].joined_phase == phase_) return false;
  for (size_t each = module.first; each < module.end; ++each) {
    if (exists(each) && awaits_gradients(each)) return true;
  }
  return false;
}

bool Step::is_ready(size_t group) const {
  // Some gradients of a group come with those of the inputs, before the others.
  const bool may_be_complete = groups_.is_complete(group) || micro_batches_.is_in(MicroBatchPhase::kWeightGradients);
  return may_be_complete && (groups_.is_in_inner_backward() || !groups_.awaits_any(group));
}

void Step::reduce_the_rest() {
  std::vector<size_t> rest;
  const auto add = [&](size_t group) {
    const bool waits = exists(group) && groups_.has_pending(group);
    if (waits && std::find(rest.begin(), rest.end(), group) == rest.end()) rest.push_back(group);
  };
  const auto& order = reads_.order();
  std::for_each(order.rbegin(), order.rend(), add);
  // Then those of a graph from an earlier forward, in an order that is the same on every rank.
  const auto from_before = static_cast<std::ptrdiff_t>(rest.size());
  const auto& unfinished = reductions_.unfinished();
  std::for_each(unfinished.begin(), unfinished.end(), add);
  std::sort(rest.begin() + from_before, rest.end(), std::greater<>());
  for (const size_t group : rest) finish_group(group);
  reductions_.forget_finished(); // what accumulates without communication or all-reduce is for a later backward
  if (is_last_backward_) reductions_.finish();
}

/// A rank whose backward needs no value of a group that is reduced, as of a bias, gathers it, and what comes after it, as do the
/// ranks whose backward reads it: all call the same collectives. FSDP2 unshards each module before its backward. What computes
/// weight gradients alone reads no weight, on any rank.
void Step::gather_as_if_read(size_t group, const GroupRules& rules) {
  if (micro_batches_.is_in(MicroBatchPhase::kWeightGradients)) return;
  if (std::exchange(notes_[group].phase, phase_) == phase_) return;
  notes_[group].unread_phase = phase_;
  if (rules.prefetch.is_prefetched_in_backward) {
    if (groups_.is_stale(group)) written(group);
    if (!is_open(groups_.residence(group))) gather(group);
  }
  prefetch_after(group, rules, PrefetchTrigger::kReduction, /*is_first_read=*/true);
}

void Step::finish_group(size_t group) {
  if (!exists(group)) return;
  const auto rules = rules_of(group);
  gather_as_if_read(group, rules);
  const bool waits = !is_last_backward_ && rules.keeps_gradients;
  if (rules.syncs && !waits) {
    reductions_.start(group);
  } else {
    groups_.keep_unreduced(group);
  }
  if (!rules.reshards_after_backward) return;
  auto& note = notes_[group];
  // The backward of a layer reads it once more, perhaps, where its weight is frozen, or gets its gradient in a later phase.
  note.is_reduced = groups_.leaves_out_any(group) || micro_batches_.is_in(MicroBatchPhase::kInputGradients);
  if (!note.is_reduced) groups_.free(group);
}

} // namespace tessera::internal
