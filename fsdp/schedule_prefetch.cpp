// What a read gathers ahead, and what it has gathered ahead in vain.

#include <tessera/fsdp/schedule.h>

#include <algorithm>
#include <memory>

namespace tessera::internal {

int64_t Schedule::known_position(const ScheduledGroup& entry) const {
  const Order& list = known_order();
  const auto own = entry.order_position;
  if (own >= 0 && own < static_cast<int64_t>(list.size()) && list[static_cast<size_t>(own)] == &entry) return own;
  const auto found = std::find(list.begin(), list.end(), &entry);
  return found == list.end() ? -1 : found - list.begin();
}

/// Whether a forward that reads `group` has gone on without what was gathered ahead.
bool Schedule::is_passed(const ScheduledGroup& ahead, const ParameterGroup& group) {
  // The end of a backward frees it; another rank may read another bucket before; a list knows better than the order.
  if (state_ == State::kBackward || ahead.module.has_buckets() || ahead.ahead == Ahead::kOfList) return false;
  const auto here = known_position(scheduled(group)), there = known_position(ahead);
  if (there < 0) return here >= 0 && here + 1 < static_cast<int64_t>(known_order().size());
  return there < here;
}

GroupPtr Schedule::next_of(const ParameterGroup& group, int64_t step, bool is_first_read) {
  const auto at = [](const auto& list, int64_t position) {
    return position >= 0 && position < static_cast<int64_t>(list.size()) ? &list[static_cast<size_t>(position)] : nullptr;
  };
  const bool forward = state_ != State::kBackward;
  const Order& list = known_order();
  const auto& entry = scheduled(group);
  const auto* own = at(list, entry.order_position);
  if (own && *own == &entry) {
    if (const auto* next = at(list, entry.order_position + (forward ? step : -step))) return (*next)->group.lock();
  }
  if (!forward || !order_.empty() || !is_first_read) return nullptr;
  // The first forward, perhaps of many without a backward: modules mostly run in the order in which they are registered.
  int64_t position = static_cast<int64_t>(group.number) + 1;
  const auto is_ahead = [&](const ScheduledGroup& each) {
    return !each.group.expired() && each.recorded_forward != forward_epoch_;
  };
  for (const ScheduledGroup* next = nullptr; (next = at(groups_, position)) != nullptr; ++position) {
    if (is_ahead(*next) && --step == 0) return next->group.lock();
  }
  return nullptr;
}

void Schedule::prefetch_after(const ParameterGroup& group, AheadOf event, bool is_first_read) {
  const auto& settings = *scheduled(group).prefetch;
  const auto is_wanted = [&](const GroupPtr& each) {
    return each && (event == AheadOf::kRead || scheduled(*each).phase != phase_);
  };
  const auto& list = state_ == State::kBackward ? settings.in_backward : settings.in_forward;
  for (const auto& weak : list) {
    if (const GroupPtr each = weak.lock(); is_wanted(each)) prefetch(*each, Ahead::kOfList);
  }
  if (!list.empty()) return;
  for (int64_t step = 1; step <= settings.depth; ++step) {
    if (const GroupPtr next = next_of(group, step, is_first_read); is_wanted(next)) prefetch(*next, Ahead::kOfOrder);
  }
  if (!group.memory()) return; // a gather that follows finds the shard on the device
  if (const GroupPtr next = next_of(group, settings.depth + 1, is_first_read); is_wanted(next)) next->start_fetch();
}

void Schedule::prefetch(ParameterGroup& group, Ahead why) {
  if (!group.has_memory() || (state_ == State::kBackward && !scheduled(group).prefetch->is_prefetched_in_backward)) return;
  if (group.is_stale()) group.reshard();
  if (!group.is_open()) scheduled(group).ahead = why;
  open(group);
}

} // namespace tessera::internal
