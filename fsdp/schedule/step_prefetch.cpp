// What a read gathers ahead, and what it has gathered ahead in vain.

#include <tessera/fsdp/schedule/step.h>

#include <optional>

namespace tessera::internal {

/// Whether a forward that reads `group` has gone on without what was gathered ahead.
bool Step::is_passed(size_t ahead, size_t group) const {
  const auto& note = notes_[ahead];
  // The end of a backward frees it; another rank may read another bucket before; a list knows better than the order.
  if (is_in_backward() || note.place.module.has_buckets() || note.ahead == PrefetchReason::kOfList) return false;
  return reads_.is_passed(ahead, group);
}

/// What a phase of a micro-batch waits for before anything else.
void Step::prefetch_first(MicroBatchPhase phase) {
  const bool forward = phase == MicroBatchPhase::kForward;
  const auto first = phase == MicroBatchPhase::kWeightGradients ? std::nullopt : reads_.first_read(forward);
  if (!first || !exists(*first)) return;
  const auto rule = rules_of(*first).prefetch;
  if (rule.depth > 0 && (forward || rule.is_prefetched_in_backward)) prefetch(*first, PrefetchReason::kOfOrder);
}

void Step::prefetch_after(size_t group, const GroupRules& rules, PrefetchTrigger event, bool is_first_read) {
  if (micro_batches_.is_in(MicroBatchPhase::kWeightGradients)) return; // which mostly reads nothing
  const auto is_wanted = [&](size_t each) { return event == PrefetchTrigger::kRead || notes_[each].phase != phase_; };
  const auto list = groups_.prefetch_list(group, is_in_backward());
  for (const size_t each : list) {
    if (is_wanted(each)) prefetch(each, PrefetchReason::kOfList);
  }
  if (!list.empty()) return;
  const int64_t depth = rules.prefetch.depth;
  const auto next_of = [&](int64_t step) { // what is reduced unread has its first read's place on all ranks
    const bool is_read = event == PrefetchTrigger::kRead;
    return is_read ? reads_.next_read(group, step, is_first_read) : reads_.next_in_order(group, step, is_first_read);
  };
  for (int64_t step = 1; step <= depth; ++step) {
    if (const auto next = next_of(step); next && is_wanted(*next)) prefetch(*next, PrefetchReason::kOfOrder);
  }
  if (!rules.is_offloaded) return; // a gather that follows finds the shard on the device
  if (const auto next = next_of(depth + 1); next && is_wanted(*next)) groups_.fetch(*next);
}

void Step::prefetch(size_t group, PrefetchReason why) {
  const auto residence = groups_.residence(group);
  const bool is_stale = residence != Residence::kGone && groups_.is_stale(group);
  if (is_open(residence) && !is_stale) return;
  if (!groups_.has_memory(group) || (is_in_backward() && !rules_of(group).prefetch.is_prefetched_in_backward)) return;
  if (is_stale) written(group);
  notes_[group].ahead = why;
  gather(group);
}

} // namespace tessera::internal
