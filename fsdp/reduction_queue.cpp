#include <tessera/fsdp/reduction_queue.h>

#include <utility>

namespace tessera::internal {

void ReductionQueue::start(ScheduledGroup& entry, ReadyGradients& ready) {
  entry.gradients->finish_reduce(ready); // the one before, when a group is reduced twice in a backward
  while (!reducing_.empty()) {
    auto* oldest = reducing_.front();
    const GroupPtr group = oldest->group.lock();
    if (group) oldest->gradients->advance_reduce();
    if (group && group->axes().reduces_twice() && reducing_.size() < 2) break;
    reducing_.erase(reducing_.begin());
    if (group) oldest->gradients->finish_reduce(ready);
  }
  entry.gradients->start_reduce(ready);
  const GroupPtr group = entry.group.lock();
  if (group && !group->axes().reduce_scatter()) entry.gradients->advance_reduce(); // its first collective is the all-reduce
  if (entry.gradients->is_reducing()) reducing_.push_back(&entry);
}

void ReductionQueue::finish(ReadyGradients& ready) {
  for (auto* entry : std::exchange(reducing_, {})) {
    if (const GroupPtr group = entry->group.lock()) entry->gradients->finish_reduce(ready);
  }
}

} // namespace tessera::internal
