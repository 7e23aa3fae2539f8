// What a read gathers ahead, and what it has gathered ahead in vain.

#include <tessera/fsdp/schedule/step.h>

#include <algorithm>

namespace tessera::internal {

int64_t Step::known_position(size_t group) const {
  const Order& list = known_order();
  const auto own = notes_[group].order_position;
  if (own >= 0 && own < static_cast<int64_t>(list.size()) && list[static_cast<size_t>(own)] == group) return own;
  const auto found = std::find(list.begin(), list.end(), group);
  return found == list.end() ? -1 : found - list.begin();
}

/// Whether a forward that reads `group` has gone on without what was gathered ahead.
bool Step::is_passed(size_t ahead, size_t group) const {
  const auto& note = notes_[ahead];
  // The end of a backward frees it; another rank may read another bucket before; a list knows better than the order.
  if (is_in_backward() || note.place.module.has_buckets() || note.ahead == PrefetchReason::kOfList) return false;
  if (const Trace& trace = known_trace(); trace.has_repeats && follows(trace, group)) {
    const auto behind = trace.reads.begin() + static_cast<std::ptrdiff_t>(notes_[group].trace_position) + 1;
    if (std::find(behind, trace.reads.end(), ahead) != trace.reads.end()) return false;
  }
  const auto here = known_position(group), there = known_position(ahead);
  if (there < 0) return here >= 0 && here + 1 < static_cast<int64_t>(known_order().size());
  return there < here;
}

/// The `step`-th group that this phase will need after a read of `group`, as far as it is known.
std::optional<size_t> Step::next_read(size_t group, int64_t step, bool is_first_read) const {
  const Trace& trace = known_trace();
  if (!follows(trace, group)) return next_in_order(group, step, is_first_read);
  const auto next = notes_[group].trace_position + (is_in_backward() ? -step : step);
  if (next >= 0 && next < static_cast<int64_t>(trace.reads.size())) return trace.reads[static_cast<size_t>(next)];
  if (is_in_backward() || knows_order()) return std::nullopt;
  return next_in_order(group, step, is_first_read);
}

/// The same by the order of first reads. Before an order is known, it is guessed, at the first read of `group` in this phase
/// alone.
std::optional<size_t> Step::next_in_order(size_t group, int64_t step, bool is_first_read) const {
  const bool forward = !is_in_backward();
  const Order& list = known_order();
  const auto size = static_cast<int64_t>(list.size()), own = notes_[group].order_position;
  if (own >= 0 && own < size && list[static_cast<size_t>(own)] == group) {
    const auto next = forward ? own + step : own - step;
    if (next >= 0 && next < size) return list[static_cast<size_t>(next)];
  }
  if (!forward || knows_order() || !is_first_read) return std::nullopt;
  return next_registered(group, step);
}

/// In the first forward, perhaps of many without a backward: modules mostly run in the order in which they are registered.
std::optional<size_t> Step::next_registered(size_t group, int64_t step) const {
  for (size_t next = group + 1; next < notes_.size(); ++next) {
    if (!is_recorded(next) && exists(next) && --step == 0) return next;
  }
  return std::nullopt;
}

/// What a phase of a micro-batch waits for before anything else.
void Step::prefetch_first(MicroBatchPhase phase) {
  const bool forward = phase == MicroBatchPhase::kForward;
  const Order& list = forward || tracing_.reads.empty() ? known_trace().reads : tracing_.reads;
  if (list.empty() || phase == MicroBatchPhase::kWeightGradients) return;
  const size_t first = forward ? list.front() : list.back();
  if (!exists(first)) return;
  const auto rule = rules_of(first).prefetch;
  if (rule.depth > 0 && (forward || rule.is_prefetched_in_backward)) prefetch(first, PrefetchReason::kOfOrder);
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
    return event == PrefetchTrigger::kRead ? next_read(group, step, is_first_read) : next_in_order(group, step, is_first_read);
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
