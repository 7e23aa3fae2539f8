// What the step asks, and what it decides, performed on the groups.

#include <tessera/fsdp/schedule/schedule.h>

#include <torch/csrc/autograd/graph_task.h>

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

Residence Schedule::residence(size_t group) const { return of(group, residence_of); }
bool Schedule::has_memory(size_t group) const { return of(group, &ParameterGroup::has_memory); }
bool Schedule::is_stale(size_t group) const { return of(group, &ParameterGroup::is_stale); }
bool Schedule::expects_any(size_t group) const { return groups_[group].gradients->landed().expects_any(); }
bool Schedule::is_complete(size_t group) const { return groups_[group].gradients->landed().is_complete(); }
bool Schedule::has_pending(size_t group) const { return groups_[group].gradients->has_pending(); }
bool Schedule::is_unfinished(size_t group) const { return groups_[group].gradients->is_unfinished(); }
bool Schedule::leaves_out_any(size_t group) const { return groups_[group].gradients->leaves_out_any(); }
bool Schedule::is_in_inner_backward() const { return torch::autograd::get_current_graph_task_id() != graph_task_id_; }

bool Schedule::awaits_any(size_t number) const {
  return of(number, [&](const ParameterGroup& group) {
    return groups_[number].gradients->landed().awaits_any([&](size_t index, bool is_expected) {
      const auto& accumulator = group.parameters()[index].accumulator;
      return accumulator ? is_in_graph_task(accumulator.get()) : is_expected;
    });
  });
}

void Schedule::wait(size_t group) { of(group, &ParameterGroup::finish_gather); }
void Schedule::free(size_t group) { of(group, &ParameterGroup::reshard); }
void Schedule::free_after_forward(size_t group) { of(group, &ParameterGroup::reshard_after_forward); }
void Schedule::fetch(size_t group) { of(group, &ParameterGroup::start_fetch); }
void Schedule::gather(size_t group) {
  of(group, &ParameterGroup::start_gather);
  if (resources_->recorder) note_unsharded();
}

void Schedule::forget_landed(size_t group) { groups_[group].gradients->landed().forget(); }
void Schedule::join_reduction(size_t group) { groups_[group].gradients->join_reduction(); }
void Schedule::keep_unreduced(size_t group) { groups_[group].gradients->keep_unreduced(); }
void Schedule::withhold_unreduced(size_t group) { groups_[group].gradients->withhold_unreduced(); }

bool Schedule::start_reduction(size_t number) {
  return of(number, [&](const ParameterGroup&) {
    auto& gradients = *groups_[number].gradients;
    gradients.start_reduce(ready_);
    return gradients.is_reducing();
  });
}

void Schedule::advance_reduction(size_t number) {
  of(number, [&](const ParameterGroup&) { groups_[number].gradients->advance_reduce(); });
}

void Schedule::finish_reduction(size_t number) {
  of(number, [&](const ParameterGroup&) { groups_[number].gradients->finish_reduce(ready_); });
}

void Schedule::note_unsharded() {
  int64_t bytes = 0;
  for (const size_t each : step_.open_groups()) bytes += of(each, &ParameterGroup::unsharded_bytes);
  resources_->recorder->note_unsharded(bytes);
}

} // namespace tessera::internal
