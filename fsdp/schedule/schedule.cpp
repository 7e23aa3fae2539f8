#include <tessera/fsdp/schedule/schedule.h>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <utility>

#include <tessera/activations/recomputation.h>
#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/calls/call_origin.h>
#include <tessera/dtensor/calls/call_site.h>
#include <tessera/dtensor/tensor/in_backward.h>
#include <tessera/dtensor/tensor/view_replay.h>
#include <tessera/fsdp/gradients/term_sums.h>
#include <tessera/fsdp/group/parallel_parameter.h>
#include <tessera/fsdp/group/step_recorder.h>
#include <tessera/fsdp/schedule/graph_task.h>
#include <tessera/optim/parts/backward_mark.h>

namespace tessera::internal {

void Schedule::set_groups(std::vector<ScheduledGroup> groups) {
  const ModelLock lock(mutex_);
  groups_ = std::move(groups);
  step_.set_places(places_of(groups_));
}

void Schedule::take_settings(const Schedule& other) {
  const bool is_last = is_last_backward() && other.is_last_backward();
  const auto weights = [&] {
    const ModelLock lock(other.mutex_);
    return other.gradient_weights_;
  }();
  const ModelLock lock(mutex_);
  step_.set_is_last_backward(is_last);
  gradient_weights_.take(weights);
}

bool Schedule::has_failed_backward() const {
  if (!step_.is_in_backward()) return false;
  // Once it has thrown, a thread of the device's may hold the graph task for a moment yet. On the CPU nothing does: then a read
  // outside of a backward is another thread's, for which a hook waits.
  return graph_task_.mark.expired() || (!device_.is_cpu() && !in_backward());
}

bool Schedule::follow(const ParameterGroup* read) {
  const bool backward = in_backward();
  if (has_failed_backward()) abandon_backward();
  if (backward && !step_.is_in_backward() && !(read && is_forward_in_hook(*read))) begin_backward();
  if (!backward && step_.state() == Step::State::kIdle) begin_forward();
  return backward;
}

void Schedule::begin_forward() {
  step_.begin_forward();
  registrations_.begin_forward();
}

void Schedule::begin_backward() {
  step_.begin_backward();
  // The graph task owns its callbacks: a backward that fails drops this one, and its mark with it.
  const std::shared_ptr<Schedule> mark(this, [weak = weak_from_this()](Schedule*) {
    if (const auto self = weak.lock()) self->drop_ready_gradients();
  });
  graph_task_ = {mark, torch::autograd::get_current_graph_task_id()};
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this(), mark] {
    if (const auto self = weak.lock()) self->finish_backward();
  });
  if (!watch_.is_done()) watch_plain_leaves();
}

/// At the end of a graph task. What a failed one has left owns its groups, which own this schedule.
void Schedule::drop_ready_gradients() {
  ReadyGradients dropped; // outlives the lock, which may end with them
  const ModelLock lock(mutex_);
  if (graph_task_.mark.expired()) dropped = deliveries_.drop();
}

/// In the first backwards; one rank warns for all.
void Schedule::watch_plain_leaves() {
  uint64_t writes = 0;
  std::shared_ptr<const GroupOwner> owner;
  for (const auto& entry : groups_) {
    const GroupPtr group = entry.group.lock();
    if (!group) continue;
    if (group->roles().mesh().size() == 1 || !group->roles().is_first_rank()) return watch_.end();
    writes += group->shard_version();
    for (const auto& each : entry.beside) {
      if (const GroupPtr other = each.group.lock()) writes += other->shard_version();
    }
    owner = group->owner;
  }
  watch_.look(writes, [&](const at::Tensor& leaf) { return owner->ignores(leaf); });
}

Schedule::KeepOpen::KeepOpen(Schedule& schedule, const std::vector<ParameterGroup*>& groups) : schedule_(schedule) {
  const ModelLock lock(schedule_.mutex_);
  std::vector<size_t> numbers;
  for (const auto* group : groups) {
    const bool is_of_model = group->number < schedule_.groups_.size() && schedule_.scheduled(*group).gradients_of(*group, lock);
    if (is_of_model) numbers.push_back(group->number);
  }
  before_ = schedule_.step_.keep_open(std::move(numbers));
}

Schedule::KeepOpen::~KeepOpen() {
  const ModelLock lock(schedule_.mutex_);
  schedule_.step_.keep_open(std::move(before_));
}

void Schedule::read(ParameterGroup& group) {
  const ModelLock lock(mutex_);
  read_locked(group);
}

void Schedule::read_locked(ParameterGroup& group) {
  TORCH_CHECK(refusal_.empty(), refusal_);
  const bool backward = follow(&group), trains = !backward && at::GradMode::is_enabled();
  if (group.is_stale()) step_.written(group.number);
  auto& entry = scheduled(group);
  if (!backward) {
    if (!step_.is_in_backward() && !step_.reads().is_recorded(group.number)) check_recorded(entry, group);
    if (trains) check_unchanged(entry, group);
  }
  if (resources_->recorder) note_read(group);
  const uint64_t recomputation = backward ? current_recomputation() : 0;
  const bool has_gathered = step_.read({.group = group.number,
                                        .residence = entry.beside.empty() ? residence_of(group) : residence(group.number),
                                        .in_backward = backward,
                                        .recomputation = recomputation,
                                        .by_own_function = backward && recomputation == 0 && dispatch::in_nested_forward(),
                                        .in_grad_mode = trains});
  if (!has_gathered) group.finish_gather(mutex_.held()); // for another stream than the last
}

void Schedule::read_parameter(ParameterGroup& group, size_t index, bool expects_gradient) {
  const ModelLock lock(mutex_);
  check_not_stepped(group, index);
  read_locked(group);
  note_forward(group);
  if (!expects_gradient) return; // an evaluation may run on another stream
  compute_stream_ = current_stream_if_any(device_);
  auto& entry = scheduled(group);
  check_unchanged(entry, group);
  const auto forward = step_.reads().forward_number();
  if (!entry.beside.empty())
    for_each_part(group.number, [&](ParameterGroup&, GroupGradients& gradients) { gradients.landed().begin(forward); });
  gradients_of(group).landed().expect(index, forward);
}

/// What a backward computes again must find the values that the forward found. (Derivative formulas compare versions.)
void Schedule::check_not_stepped(ParameterGroup& group, size_t index) {
  auto& parameter = group.parameters()[index];
  if (C10_LIKELY(!parameter.stepped_in)) return;
  const auto origin = call_origin();
  if (origin == CallOrigin::kFormula || origin == CallOrigin::kWrittenView) return;
  const bool runs_again = origin == CallOrigin::kSecondRun || origin == CallOrigin::kFunction;
  if (!runs_again || !is_stepped_in_backward(at::Tensor(parameter.tensor.lock()))) return parameter.stepped_in.reset();
  TORCH_CHECK(false, "step_in_backward: ", group.full_name(index),
              " was stepped when its gradient had come, and then the backward of a function read it on rank ",
              process_context().rank(),
              ", which would compute gradients of other values than the forward's. Step after the backward");
}

/// Looks for new parameters when another forward begins without a backward since the last one. That is when the first module is
/// read again after the last one. Modules are compared, not groups: which buckets of a module are read may differ between ranks.
void Schedule::note_forward(const ParameterGroup& group) {
  if (step_.state() != Step::State::kForward) return;
  if (!registrations_.is_another(scheduled(group).place.module.first) || !at::GradMode::is_enabled()) return;
  group.owner->check_no_new_parameter();
  registrations_.begin_another();
  step_.begin_another_forward(group.number);
}

void Schedule::check_alive(const ParameterGroup& group) const {
  if (scheduled(group).beside.empty()) return group.check_parameters_alive();
  for_each_part(group.number, [](const ParameterGroup& part, GroupGradients&) { part.check_parameters_alive(); });
}

/// Checks the group before its first read in this forward.
void Schedule::check_recorded(ScheduledGroup& entry, const ParameterGroup& group) {
  group.prefetch_parameters();
  check_alive(group);
  const bool is_first = !step_.reads().has_recorded_any();
  if (is_first) group.owner->check_no_new_parameter();
  group.owner->check_boundary();
  note_module(group, is_first);
  if (at::GradMode::is_enabled()) entry.checked_forward = step_.reads().forward_number();
}

/// The order of the modules is the same on all ranks, unlike that of a module's buckets.
void Schedule::note_module(const ParameterGroup& group, bool is_first) {
  const size_t module = scheduled(group).place.module.first;
  registrations_.note_read(module, is_first);
  if (!step_.is_module_recorded(group.number)) registrations_.note_new(module, step_.reads().knows_order());
}

/// Before the first read in grad mode: an evaluation recorded the group, and the model may have been changed since.
void Schedule::check_unchanged(ScheduledGroup& entry, const ParameterGroup& group) {
  const auto forward = step_.reads().forward_number();
  if (entry.checked_forward == forward) return;
  check_alive(group);
  if (registrations_.must_look_again(forward)) group.owner->check_no_new_parameter();
  registrations_.note_look(forward);
  entry.checked_forward = forward;
}

/// Runs `locked`, which needs the lock, and then, without it, the user's hooks on the gradients that became ready. Whether there
/// were any.
template <typename Locked> // void(const Held&)
bool Schedule::deliver_after(const Locked& locked) {
  const KeepViewReplay keep; // of a program that has views of plain tensors beside the DTensors that are made here
  ReadyGradients ready;
  {
    const ModelLock lock(mutex_);
    locked(lock);
    ready = deliveries_.take();
  }
  const bool has_any = !ready.empty();
  deliver(std::move(ready));
  return has_any;
}

/// Optimizers that step in backward follow the last gradient of each group.
void Schedule::deliver(ReadyGradients ready) {
  const at::NoGradGuard no_grad;
  if (!is_any_stepped_in_backward()) {
    for (auto& each : ready) internal::deliver(std::move(each));
    return;
  }
  for (size_t i = 0; i < ready.size();) {
    const GroupPtr group = ready[i].group;
    std::vector<size_t> landed;
    for (; i < ready.size() && ready[i].group == group; ++i) {
      landed.push_back(ready[i].index);
      internal::deliver(std::move(ready[i]));
    }
    step_in_backward(*group, landed);
  }
}

void Schedule::step_in_backward(ParameterGroup& group, const std::vector<size_t>& landed) {
  std::vector<std::shared_ptr<GradientTaker>> takers;
  std::vector<at::Tensor> parameters;
  int64_t backward = 0;
  {
    const ModelLock lock(mutex_);
    takers = gradients_of(group).settings.takers;
    if (takers.empty()) return;
    if (has_failed_backward()) abandon_backward();
    backward = step_.is_in_backward() ? graph_task_.id : torch::autograd::get_current_graph_task_id();
    for (const size_t index : landed) {
      if (const auto tensor = to_step(group, index, backward); tensor.defined()) parameters.push_back(tensor);
    }
  }
  TORCH_CHECK(is_last_backward(), "step_in_backward: ", group.label(),
              " would be stepped after set_is_last_backward(false), before the backwards that follow have added their gradients: "
              "accumulate them with no_sync");
  for (const auto& taker : takers) taker->take(parameters, backward);
}

/// Undefined where the parameter is gone.
at::Tensor Schedule::to_step(ParameterGroup& group, size_t index, int64_t backward) {
  auto& parameter = group.parameters()[index];
  at::Tensor tensor(parameter.tensor.lock());
  if (!tensor.defined() || !is_stepped_in_backward(tensor)) return tensor;
  TORCH_CHECK(std::exchange(parameter.stepped_in, backward) != backward, "step_in_backward: ", group.full_name(index),
              " was stepped when its gradient had come, and then the same backward brought another one on rank ",
              process_context().rank(),
              ", of a backward inside it: one step with their sum would be another. Step after the backward");
  return tensor;
}

/// Amid the work that calls a function of the program nothing of a backward can be done.
void Schedule::check_no_program(const ModelLock& lock, const ParameterGroup& group, size_t index) {
  if (C10_LIKELY(!lock.program())) return;
  TORCH_CHECK(false, "a backward in ", lock.program(), " has brought a gradient of ", group.full_name(index), " on rank ",
              process_context().rank(),
              ": it runs amid a backward of the same model, where it may read the parameters, but no other backward of the model "
              "may run. Run it before the backward or after it, or in a hook of a parameter (register_hook)");
}

void Schedule::land(ParameterGroup& group, size_t index, const at::Tensor& gradient) {
  const StreamScope scope(compute_stream_);
  if (scope.has_switched()) use_on_current_stream(gradient);
  {
    const ModelLock lock(mutex_);
    check_no_program(lock, group, index);
    follow();
    auto& entry = scheduled(group);
    auto& gradients = *entry.gradients_of(group, lock);
    entry.last_landed = &gradients;
    step_.expect_landing(group.number, gradients.needs_only_buffer());
    gradients.land(index, gradient, gradient_weights_.current());
    const bool is_last = entry.beside.empty() ? gradients.landed().is_complete() : is_complete(group.number);
    if (!step_.landed(group.number, is_last)) return;
  }
  deliver_after([&](const Held& /*held*/) {
    mutex_.held();
    step_.reduce_after(group.number);
    hold_parts();
  });
}

void Schedule::land_sharded(ReadyGradient gradient) {
  {
    const ModelLock lock(mutex_);
    check_no_program(lock, *gradient.group, gradient.index);
  }
  const auto& parameter = gradient.group->parameters()[gradient.index];
  gradient.is_part = is_read_in_both_ways(parameter);
  if (!gradient.is_part) {
    ReadyGradients alone;
    alone.push_back(std::move(gradient));
    return deliver(std::move(alone));
  }
  if (gives_terms(parameter)) { // as the other part is one
    const auto& meta = *dtensor_meta(gradient.value);
    gradient.value = make_dtensor(once(meta.local, parameter.forward.parallel->mesh()), meta.spec);
    gradient.is_term = true;
  }
  const ModelLock lock(mutex_);
  if (has_failed_backward()) abandon_backward();
  if (step_.is_in_backward()) return deliveries_.add(std::move(gradient));
  early_parts()->parts.push_back(std::move(gradient));
}

/// Finds the parts of the graph task that runs now, before its first event that begins a backward. This call is no such event:
/// autograd's thread for the host brings it before those of the device's thread on one rank and after them on another, and a
/// backward that fails between must have begun on all ranks or on none. The graph task owns the parts.
std::shared_ptr<EarlyParts> Schedule::early_parts() {
  const int id = torch::autograd::get_current_graph_task_id();
  if (auto known = deliveries_.early(id)) return known;
  auto early = deliveries_.begin_early(id);
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this(), early] {
    if (const auto self = weak.lock()) self->take(*early);
  });
  return early;
}

/// At the end of their graph task: for the backward that has begun since, or begins now, and ends after this.
void Schedule::take(EarlyParts& early) {
  const ModelLock lock(mutex_);
  follow();
  deliveries_.add(early);
}

void Schedule::hold_parts() { deliveries_.hold_parts(is_read_in_both_ways); }

void Schedule::finish_backward() {
  const StreamScope scope(compute_stream_);
  const auto finish = [&](const Held& /*held*/) {
    mutex_.held();
    if (!step_.is_in_backward()) return;
    step_.reduce_the_rest();
    deliveries_.wait_for_copies();
    const at::NoGradGuard no_grad;
    deliveries_.join_parts();
    sum_terms(deliveries_.ready());
  };
  while (deliver_after(finish)) { // a backward of the same model in a hook makes more
  }
  const ModelLock lock(mutex_);
  if (!step_.is_in_backward()) return;
  if (!watch_.is_done()) watch_.count_holders();
  if (step_.reads().has_recorded_any()) registrations_.end_forward();
  step_.end_backward();
}

void Schedule::abandon_backward() {
  const auto dropped = step_.abandon_backward();
  deliveries_.drop();
  std::vector<Work> in_flight;
  for (const size_t each : dropped) {
    for_each_part(each, [&](ParameterGroup&, GroupGradients& gradients) { in_flight.push_back(gradients.discard()); });
  }
  for (auto& work : in_flight) work.wait(); // which throws for a broken communicator, when nothing is left to forget
}

void Schedule::set_reporting(bool reports) {
  const ModelLock lock(mutex_);
  resources_->recorder = reports ? std::make_shared<StepRecorder>() : nullptr;
  if (reports) note_unsharded();
}

StepReport Schedule::report() {
  const ModelLock lock(mutex_);
  TORCH_CHECK(resources_->recorder, "report: nothing was recorded on rank ", process_context().rank(),
              ": call set_reporting(true) before the step");
  auto report = resources_->recorder->take();
  note_unsharded(); // what is gathered stays so in the next one
  return report;
}

void Schedule::look_anew(const Held& /*held*/) {
  mutex_.held();
  step_.look_anew();
}

void Schedule::refuse(std::string why) {
  const ModelLock lock(mutex_);
  refusal_ = std::move(why);
}

void Schedule::forget_failed_backward() {
  const ModelLock lock(mutex_);
  if (has_failed_backward()) abandon_backward();
}

void Schedule::drop_gradients(ParameterGroup& group) {
  const ModelLock lock(mutex_);
  if (has_failed_backward()) abandon_backward();
  deliveries_.drop(group);
  step_.forget_gradients(group.number);
  gradients_of(group).discard().wait(); // before the memory of what was in flight is used again
}

void Schedule::start_unshard(ParameterGroup& group) {
  const ModelLock lock(mutex_);
  step_.unshard(group.number);
}

void Schedule::finish_unshard(ParameterGroup& group) {
  const ModelLock lock(mutex_);
  group.finish_gather(lock);
}

void Schedule::unshard(ParameterGroup& group) {
  const ModelLock lock(mutex_);
  step_.unshard(group.number);
  group.finish_gather(lock);
}

void Schedule::reshard_after_forward(const Held& /*held*/, ParameterGroup& group) {
  mutex_.held();
  step_.reshard_after_forward(group.number);
}

void Schedule::reshard(ParameterGroup& group) {
  const ModelLock lock(mutex_);
  step_.reshard(group.number);
}

void Schedule::write_back(ParameterGroup& group, const UnshardedRange& written) {
  const ModelLock lock(mutex_);
  group.write_back(lock, written);
}

} // namespace tessera::internal
