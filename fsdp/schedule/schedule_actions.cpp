// What the step asks, and what it decides, performed on the groups.

#include <tessera/fsdp/schedule/schedule.h>

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <functional>
#include <type_traits>

#include <tessera/fsdp/group/step_recorder.h>
#include <tessera/fsdp/schedule/graph_task.h>

namespace tessera::internal {

/// Calls `function` of a group. Nothing, zero or false where the group is gone.
template <typename Function>
auto Schedule::of(size_t number, const Function& function) const {
  using Result = std::invoke_result_t<Function, ParameterGroup&>;
  const GroupPtr group = groups_[number].group.lock();
  if (group) return std::invoke(function, *group);
  return Result();
}

/// Whether it holds for the group or for one beside it that is there.
template <typename Holds> // bool(const GroupGradients&)
bool Schedule::any_part(size_t number, const Holds& holds) const {
  const auto& entry = groups_[number];
  if (entry.beside.empty()) return holds(entry.gradients->get(mutex_.held()));
  bool any = false;
  for_each_part(number, [&](const ParameterGroup&, const GroupGradients& gradients) { any = any || holds(gradients); });
  return any;
}

Residence Schedule::residence(size_t number) const {
  auto least = of(number, residence_of);
  for (const auto& each : groups_[number].beside) {
    const GroupPtr group = each.group.lock();
    if (group) least = least == Residence::kGone ? residence_of(*group) : std::min(least, residence_of(*group));
  }
  return least;
}

bool Schedule::has_memory(size_t number) const {
  bool any = false;
  for_each_part(number, [&](const ParameterGroup& group, const GroupGradients&) { any = any || group.has_memory(); });
  return any;
}

bool Schedule::is_stale(size_t number) const {
  bool any = false;
  for_each_part(number, [&](const ParameterGroup& group, const GroupGradients&) { any = any || group.is_stale(); });
  return any;
}

bool Schedule::expects_any(size_t number) const {
  return any_part(number, [](const GroupGradients& each) { return each.landed().expects_any(); });
}
bool Schedule::is_complete(size_t number) const {
  return any_part(number, [](const GroupGradients& each) { return each.landed().has_any(); }) &&
         !any_part(number, [](const GroupGradients& each) { return each.landed().lacks_any(); });
}
bool Schedule::has_pending(size_t number) const {
  return any_part(number, [](const GroupGradients& each) { return each.has_pending(); });
}
bool Schedule::is_unfinished(size_t number) const {
  return any_part(number, [](const GroupGradients& each) { return each.is_unfinished(); });
}
bool Schedule::leaves_out_any(size_t number) const {
  return any_part(number, [](const GroupGradients& each) { return each.leaves_out_any(); });
}
bool Schedule::is_in_inner_backward() const { return torch::autograd::get_current_graph_task_id() != graph_task_.id; }

bool Schedule::awaits_any(size_t number) const {
  bool any = false;
  for_each_part(number, [&](const ParameterGroup& group, const GroupGradients& gradients) {
    any = any || gradients.landed().awaits_any([&](size_t index, bool is_expected) {
      const auto& accumulator = group.parameters()[index].accumulator;
      return accumulator ? is_in_graph_task(accumulator.get()) : is_expected;
    });
  });
  return any;
}

void Schedule::wait(size_t number) {
  for_each_part(number, [&](ParameterGroup& group, GroupGradients&) { group.finish_gather(mutex_.held()); });
}
void Schedule::free(size_t number) {
  for_each_part(number, [&](ParameterGroup& group, GroupGradients&) { group.reshard(mutex_.held()); });
}
void Schedule::free_after_forward(size_t number) {
  for_each_part(number, [&](ParameterGroup& group, GroupGradients&) { group.reshard_after_forward(mutex_.held()); });
}
void Schedule::fetch(size_t number) {
  for_each_part(number, [&](ParameterGroup& group, GroupGradients&) { group.start_fetch(mutex_.held()); });
}
void Schedule::gather(size_t number) {
  for_each_part(number, [&](ParameterGroup& group, GroupGradients&) { group.start_gather(mutex_.held()); });
  if (resources_->recorder) note_unsharded();
}

void Schedule::forget_landed(size_t number) {
  for_each_part(number, [](ParameterGroup&, GroupGradients& gradients) { gradients.landed().forget(); });
}
void Schedule::join_reduction(size_t number) {
  for_each_part(number, [](ParameterGroup&, GroupGradients& gradients) { gradients.join_reduction(); });
}
void Schedule::keep_unreduced(size_t number) {
  for_each_part(number, [](ParameterGroup&, GroupGradients& gradients) { gradients.keep_unreduced(); });
}
void Schedule::withhold_unreduced(size_t number) {
  for_each_part(number, [](ParameterGroup&, GroupGradients& gradients) { gradients.withhold_unreduced(); });
}

/// Of all parts, in their order: another rank may have used others of them.
bool Schedule::start_reduction(size_t number) {
  const bool has_parts = !groups_[number].beside.empty();
  bool is_reducing = false;
  auto& ready = deliveries_.ready();
  for_each_part(number, [&](ParameterGroup&, GroupGradients& gradients) {
    if (has_parts && !gradients.has_pending()) gradients.join_reduction();
    if (has_parts && !gradients.has_pending()) return; // frozen
    gradients.start_reduce(ready);
    is_reducing = is_reducing || gradients.is_reducing();
  });
  return is_reducing;
}

void Schedule::advance_reduction(size_t number) {
  for_each_part(number, [](ParameterGroup&, GroupGradients& gradients) { gradients.advance_reduce(); });
}

void Schedule::finish_reduction(size_t number) {
  auto& ready = deliveries_.ready();
  for_each_part(number, [&](ParameterGroup&, GroupGradients& gradients) { gradients.finish_reduce(ready); });
}

void Schedule::note_unsharded() {
  int64_t bytes = 0;
  for (const size_t each : step_.open_groups())
    for_each_part(each, [&](const ParameterGroup& group, const GroupGradients&) { bytes += group.unsharded_bytes(); });
  resources_->recorder->note_unsharded(bytes);
}

} // namespace tessera::internal
