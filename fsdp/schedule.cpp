#include <tessera/fsdp/schedule.h>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <utility>

#include <tessera/activations/recomputation.h>
#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/dispatch/call_site.h>
#include <tessera/dtensor/in_backward.h>
#include <tessera/dtensor/view_replay.h>
#include <tessera/fsdp/step_recorder.h>

namespace tessera::internal {

namespace {

/// A read by the forward of a model that takes no part in the graph task which runs now: a tensor hook of another model trains
/// it.
bool is_forward_in_hook(const ParameterGroup& group) {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  // The gradients of what a recompute reads come at once.
  if (!nodes || !dispatch::in_nested_forward() || dispatch::in_custom_backward()) return false;
  bool trains = false;
  for (const auto& parameter : group.parameters()) {
    if (!is_trained(parameter)) continue;
    trains = true;
    if (nodes->count(parameter.accumulator.get()) > 0) return false;
  }
  return trains;
}

/// Whether the graph task that runs now is to run `node`, or has.
bool is_in_graph_task(torch::autograd::Node* node) {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (!nodes || nodes->count(node) == 0) return false;
  const auto* inputs = torch::autograd::get_current_graph_task_exec_info();
  if (!inputs || inputs->empty()) return true;
  const auto found = inputs->find(node);
  return found != inputs->end() && found->second.should_execute();
}

/// Whether the graph task that runs now brings a gradient of each of its leaves, the plain one and that of ops on DTensors. Hooks
/// are the program's own, and see their sum.
bool is_read_in_both_ways(const ShardedParameter& parameter) {
  if (!parameter.dtensor_leaf.defined() || !parameter.accumulator) return false;
  const auto sharded = torch::autograd::impl::try_get_grad_accumulator(parameter.dtensor_leaf);
  return sharded && is_in_graph_task(sharded.get()) && is_in_graph_task(parameter.accumulator.get());
}

} // namespace

void Schedule::enter(State next) {
  const bool legal = next == State::kForward    ? state_ == State::kIdle
                     : next == State::kBackward ? state_ != State::kBackward
                                                : state_ == State::kBackward;
  TORCH_INTERNAL_ASSERT(legal, "the schedule goes from state ", static_cast<int>(state_), " to ", static_cast<int>(next));
  state_ = next;
  ++phase_;
}

bool Schedule::has_failed_backward() const {
  if (state_ != State::kBackward) return false;
  // Once it has thrown, a thread of the device's may hold the graph task for a moment yet. On the CPU nothing does: then a read
  // outside of a backward is another thread's, for which a hook waits.
  return iteration_.graph_task.expired() || (!in_backward() && !device_.is_cpu());
}

bool Schedule::follow(const ParameterGroup* read) {
  const bool backward = in_backward();
  if (has_failed_backward()) abandon_backward();
  if (backward && state_ != State::kBackward && !(read && is_forward_in_hook(*read))) begin_backward();
  if (!backward && state_ == State::kIdle) begin_forward();
  return backward;
}

void Schedule::begin_forward() {
  enter(State::kForward);
  ++forward_epoch_;
  iteration_ = {};
}

void Schedule::begin_backward() {
  enter(State::kBackward);
  iteration_.next_to_reduce = static_cast<int64_t>(order().size()) - 1;
  for (auto* each : order()) {
    each->gradients->landed().forget();
    each->is_reduced = false;
  }
  iteration_.graph_task_id = torch::autograd::get_current_graph_task_id();
  // The graph task owns its callbacks: a backward that fails drops this one, and its mark with it.
  const std::shared_ptr<Schedule> mark(this, [weak = weak_from_this()](Schedule*) {
    if (const auto self = weak.lock()) self->drop_ready_gradients();
  });
  iteration_.graph_task = mark;
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this(), mark] {
    if (const auto self = weak.lock()) self->finish_backward();
  });
  if (!watch_.is_done()) watch_plain_leaves();
}

/// At the end of a graph task. What a failed one has left owns its groups, which own this schedule.
void Schedule::drop_ready_gradients() {
  ReadyGradients dropped; // outlives the lock, which may end with them
  const std::lock_guard lock(mutex_);
  if (iteration_.graph_task.expired()) dropped.swap(ready_);
}

/// In the first backwards; one rank warns for all.
void Schedule::watch_plain_leaves() {
  uint64_t writes = 0;
  std::shared_ptr<const GroupOwner> owner;
  for (const auto& entry : groups_) {
    const GroupPtr group = entry.group.lock();
    if (!group) continue;
    if (group->axes().mesh().size() == 1 || !group->axes().is_first_rank()) return watch_.end();
    writes += group->shard_version();
    owner = group->owner;
  }
  watch_.look(writes, [&](const at::Tensor& leaf) { return owner->ignores(leaf); });
}

Schedule::KeepOpen::KeepOpen(Schedule& schedule, std::vector<ParameterGroup*> groups) : schedule_(schedule) {
  const std::lock_guard lock(schedule_.mutex_);
  before_ = std::exchange(schedule_.kept_, std::move(groups));
}

Schedule::KeepOpen::~KeepOpen() {
  const std::lock_guard lock(schedule_.mutex_);
  schedule_.kept_ = std::move(before_);
}

void Schedule::touch(ParameterGroup& group) {
  const std::lock_guard lock(mutex_);
  touch_locked(group);
}

void Schedule::touch_locked(ParameterGroup& group) {
  TORCH_CHECK(refusal_.empty(), refusal_);
  const bool backward = follow(&group);
  if (group.is_stale()) group.reshard();
  if (!backward && state_ != State::kBackward) record(group); // not what another thread reads, for which a hook waits
  auto& entry = scheduled(group);
  if (!backward && at::GradMode::is_enabled()) check_unchanged(entry, group);
  entry.is_held = false;
  const uint64_t recomputation = backward ? current_recomputation() : 0;
  if (!backward || recomputation > 0) entry.recomputation = recomputation;
  const bool is_first_read = std::exchange(entry.phase, phase_) != phase_;
  if (group.is_unsharded() && !is_first_read) return group.finish_gather(); // for another stream than the last
  note_read(group);
  const bool by_own_function = recomputation == 0 && dispatch::in_nested_forward(); // its gradients come at once
  if (!by_own_function) close_unrelated(group, recomputation);
  open(group);
  group.finish_gather();
  prefetch_after(group, AheadOf::kRead, is_first_read);
}

void Schedule::touch_parameter(ParameterGroup& group, size_t index, bool expects_gradient) {
  const std::lock_guard lock(mutex_);
  touch_locked(group);
  note_forward(group);
  if (!expects_gradient) return; // an evaluation may run on another stream
  compute_stream_ = current_stream_if_any(device_);
  auto& entry = scheduled(group);
  check_unchanged(entry, group);
  entry.gradients->landed().expect(index, forward_epoch_);
}

/// Looks for new parameters when another forward begins without a backward since the last one. That is when the first module is
/// read again after the last one. Modules are compared, not groups: which buckets of a module are read may differ between ranks.
void Schedule::note_forward(const ParameterGroup& group) {
  if (state_ != State::kForward) return;
  const size_t module = module_number(group);
  if (module == last_module_) {
    iteration_.has_read_last = true;
  } else if (iteration_.has_read_last && module == iteration_.first_module && at::GradMode::is_enabled()) {
    group.owner->check_no_new_parameter();
    iteration_.has_read_last = false;
  }
}

void Schedule::record(ParameterGroup& group) {
  auto& entry = scheduled(group);
  if (entry.recorded_forward == forward_epoch_) return;
  group.prefetch_parameters();
  group.check_parameters_alive();
  const bool is_first = iteration_.recording.empty();
  if (is_first) group.owner->check_no_new_parameter();
  group.owner->check_boundary();
  record_module(group, is_first);
  entry.recorded_forward = forward_epoch_;
  if (at::GradMode::is_enabled()) entry.checked_forward = forward_epoch_;
  if (is_first) place_buckets();
  if (!entry.module.has_buckets()) place(entry);
}

/// The order of the modules is the same on all ranks, unlike that of a module's buckets.
void Schedule::record_module(const ParameterGroup& group, bool is_first) {
  const size_t module = module_number(group);
  if (is_first) iteration_.first_module = module;
  const auto is_recorded = [&](const ScheduledGroup& each) { return each.recorded_forward == forward_epoch_; };
  const auto of_module = groups_of_module(scheduled(group));
  if (std::any_of(of_module.begin(), of_module.end(), is_recorded)) return;
  iteration_.newest_module = module;
  if (order_.empty()) last_module_ = module;
}

/// Before the first read in grad mode: an evaluation recorded the group, and the model may have been changed since.
void Schedule::check_unchanged(ScheduledGroup& entry, const ParameterGroup& group) {
  if (entry.checked_forward == forward_epoch_) return;
  group.check_parameters_alive();
  if (checked_forward_ != forward_epoch_) group.owner->check_no_new_parameter();
  entry.checked_forward = checked_forward_ = forward_epoch_;
}

/// Before what forward reads: another rank may read others of them, or first in another place.
void Schedule::place_buckets() {
  for (auto& each : groups_) {
    if (each.module.has_buckets()) place(each);
  }
}

void Schedule::place(ScheduledGroup& entry) {
  entry.order_position = static_cast<int64_t>(iteration_.recording.size());
  iteration_.recording.push_back(&entry);
}

void Schedule::open(ParameterGroup& group) {
  if (!group.copies() || group.is_open()) return;
  group.start_gather();
  auto* const entry = &scheduled(group);
  if (std::find(open_.begin(), open_.end(), entry) == open_.end()) open_.push_back(entry); // or resharded since, as a stale one
  if (resources_->recorder) note_unsharded();
}

void Schedule::note_unsharded() {
  int64_t bytes = 0;
  for (const auto* each : open_) {
    if (const GroupPtr group = each->group.lock()) bytes += group->unsharded_bytes();
  }
  resources_->recorder->note_unsharded(bytes);
}

void Schedule::close_unrelated(const ParameterGroup& group, uint64_t recomputation) {
  // The gradients of what a recomputation reads come next, as do those of what forward left open. A group that another
  // recomputation left open is open only for frozen parameters, and may be freed.
  const auto is_needed = [&](const ScheduledGroup& each) {
    return recomputation > 0 && (each.recomputation == 0 || each.recomputation == recomputation);
  };
  // Until the next forward reads it, and then as any other.
  const auto is_kept_for_forward = [&](const ScheduledGroup& each, const ParameterGroup& other) {
    const bool is_read = state_ != State::kBackward && each.phase == phase_;
    return !each.gradients->settings.reshard_after_backward && !is_read && !other.is_stale();
  };
  std::erase_if(open_, [&](auto* each) {
    const GroupPtr other = each->group.lock();
    if (!other || !other->is_open()) return true;
    const bool kept = std::find(kept_.begin(), kept_.end(), other.get()) != kept_.end();
    if (kept || each->is_held || is_needed(*each) || related(*other, group)) return false;
    const bool is_prefetched = !other->is_unsharded();
    if (is_prefetched ? !is_passed(*each, group) : is_kept_for_forward(*each, *other)) return false;
    const bool is_reduced = state_ == State::kBackward && each->is_reduced;
    if (!is_reduced && !other->owner->reshards_after_forward()) return false;
    state_ == State::kBackward ? other->reshard() : other->reshard_after_forward();
    return true;
  });
}

bool Schedule::related(const ParameterGroup& a, const ParameterGroup& b) const {
  const auto [above, below] = std::minmax({module_number(a), module_number(b)});
  return below < groups_[above].end;
}

std::vector<GroupPtr> Schedule::read_order() {
  const std::lock_guard lock(mutex_);
  std::vector<GroupPtr> groups;
  for (const auto* each : order()) {
    auto group = each->group.lock();
    if (group && each->recorded_forward == forward_epoch_) groups.push_back(std::move(group));
  }
  return groups;
}

/// Runs `locked` under the lock, and then, without it, the user's hooks on the gradients that became ready. Whether there were
/// any.
template <typename Locked>
bool Schedule::deliver_after(const Locked& locked) {
  const KeepViewReplay keep; // of a program that has views of plain tensors beside the DTensors that are made here
  ReadyGradients ready;
  {
    const std::lock_guard lock(mutex_);
    locked();
    ready.swap(ready_);
    const auto waits = [](const auto& each) { return each.copy != nullptr || each.is_part; };
    if (std::any_of(ready.begin(), ready.end(), waits)) {
      const auto waiting = std::stable_partition(ready.begin(), ready.end(), std::not_fn(waits));
      ready_.assign(std::move_iterator(waiting), std::move_iterator(ready.end()));
      ready.erase(waiting, ready.end());
    }
  }
  const at::NoGradGuard no_grad;
  for (auto& each : ready) deliver(std::move(each));
  return !ready.empty();
}

void Schedule::land(ParameterGroup& group, size_t index, const at::Tensor& gradient) {
  const StreamScope scope(compute_stream_);
  if (scope.has_switched()) use_on_current_stream(gradient);
  {
    const std::lock_guard lock(mutex_);
    follow();
    auto& entry = scheduled(group);
    list_unfinished(entry);
    if (entry.gradients->needs_only_buffer()) reductions_.finish(ready_);
    entry.gradients->land(index, gradient, gradient_weights_.current());
    join_buckets(entry);
    const bool is_next = entry.order_position == iteration_.next_to_reduce;
    if (is_next && !entry.gradients->landed().is_complete()) return;
  }
  deliver_after([&] {
    reduce_in_order(scheduled(group));
    hold_parts();
  });
}

void Schedule::land_sharded(ReadyGradient gradient) {
  gradient.is_part = is_read_in_both_ways(gradient.group->parameters()[gradient.index]);
  if (!gradient.is_part) return deliver(std::move(gradient));
  const std::lock_guard lock(mutex_);
  if (has_failed_backward()) abandon_backward();
  auto& held = state_ == State::kBackward ? ready_ : early_parts();
  held.push_back(std::move(gradient));
}

/// Of the graph task that runs now, before its first event that begins a backward. It is no such event: autograd's thread for the
/// host brings it before those of the device's thread on one rank and after them on another, and a backward that fails between
/// must have begun on all ranks or on none. The graph task owns the parts.
ReadyGradients& Schedule::early_parts() {
  const int id = torch::autograd::get_current_graph_task_id();
  auto early = early_parts_.lock();
  if (!early || early->graph_task_id != id) {
    early = std::make_shared<EarlyParts>(EarlyParts{id, {}});
    early_parts_ = early;
    torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this(), early] {
      if (const auto self = weak.lock()) self->take(*early);
    });
  }
  return early->parts;
}

/// At the end of their graph task: for the backward that has begun since, or begins now, and ends after this.
void Schedule::take(EarlyParts& early) {
  const std::lock_guard lock(mutex_);
  follow();
  ready_.insert(ready_.end(), std::move_iterator(early.parts.begin()), std::move_iterator(early.parts.end()));
  early.parts.clear();
}

void Schedule::hold_parts() {
  for (auto& each : ready_) each.is_part = each.is_part || is_read_in_both_ways(each.group->parameters()[each.index]);
}

/// At the end of a backward: replaces the held gradients of one parameter by their sum.
void Schedule::join_parts() {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < ready_.size(); ++i) {
    if (!std::exchange(ready_[i].is_part, false)) continue;
    const auto same = [&](const auto& each) { return each.group == ready_[i].group && each.index == ready_[i].index; };
    const auto other = std::find_if(ready_.begin() + static_cast<std::ptrdiff_t>(i) + 1, ready_.end(), same);
    if (other == ready_.end()) continue;
    add(*other, ready_[i]);
    other->is_part = true; // and perhaps of a third
    ready_.erase(ready_.begin() + static_cast<std::ptrdiff_t>(i--));
  }
}

void Schedule::list_unfinished(ScheduledGroup& entry) {
  if (!std::exchange(entry.is_listed, true)) unfinished_.push_back(&entry);
}

/// Once in a backward: those that it leaves out are reduced as what this rank does not use.
void Schedule::join_buckets(const ScheduledGroup& landed) {
  if (!landed.module.has_buckets() || landed.joined_phase == phase_) return;
  for (auto& each : groups_of_module(landed)) {
    each.joined_phase = phase_;
    if (each.group.expired()) continue;
    each.gradients->join_reduction();
    list_unfinished(each);
  }
}

/// `landed` has the gradient that came last.
void Schedule::reduce_in_order(const ScheduledGroup& landed) {
  for (auto& next = iteration_.next_to_reduce; next >= 0; --next) {
    auto* entry = order()[static_cast<size_t>(next)];
    const GroupPtr group = entry->group.lock();
    if (!group || !(entry->module.has_buckets() || entry->gradients->landed().expects_any())) continue;
    if (may_join(*entry)) return;
    const bool is_passed = landed.order_position < next && !awaits_gradients(*entry);
    if (!is_complete(*entry) && !is_passed) return; // its turn comes first on every rank
    if (entry->gradients->has_pending()) finish_group(*entry);
  }
}

/// A loss that uses only some of what a forward read leaves out the other gradients, and a torch::autograd::Function brings some
/// that no read foretold. A backward inside this one's graph task cannot tell.
bool Schedule::awaits_gradients(const ScheduledGroup& entry) const {
  if (is_in_inner_backward()) return true;
  const GroupPtr group = entry.group.lock();
  return entry.gradients->landed().awaits_any([&](size_t index, bool is_expected) {
    const auto& accumulator = group->parameters()[index].accumulator;
    return accumulator ? is_in_graph_task(accumulator.get()) : is_expected;
  });
}

/// A bucket whose module has had no gradient in this backward yet, and will.
bool Schedule::may_join(const ScheduledGroup& entry) {
  if (!entry.module.has_buckets() || entry.joined_phase == phase_) return false;
  const auto buckets = groups_of_module(entry);
  return std::any_of(buckets.begin(), buckets.end(),
                     [&](const ScheduledGroup& each) { return !each.group.expired() && awaits_gradients(each); });
}

bool Schedule::is_complete(const ScheduledGroup& entry) const {
  return entry.gradients->landed().is_complete() && (is_in_inner_backward() || !awaits_gradients(entry));
}

bool Schedule::is_in_inner_backward() const { return torch::autograd::get_current_graph_task_id() != iteration_.graph_task_id; }

void Schedule::reduce_the_rest() {
  Order rest;
  const auto add = [&](ScheduledGroup* entry) {
    const bool waits = !entry->group.expired() && entry->gradients->has_pending();
    if (waits && std::find(rest.begin(), rest.end(), entry) == rest.end()) rest.push_back(entry);
  };
  std::for_each(order().rbegin(), order().rend(), add);
  // Then those of a graph from an earlier forward, in an order that is the same on every rank.
  const auto from_before = static_cast<std::ptrdiff_t>(rest.size());
  std::for_each(unfinished_.begin(), unfinished_.end(), add);
  std::sort(rest.begin() + from_before, rest.end(), std::greater<>()); // by number
  for (auto* entry : rest) finish_group(*entry);
  std::erase_if(unfinished_, [](auto* entry) { // what accumulates without communication or all-reduce is for a later backward
    entry->is_listed = !entry->group.expired() && entry->gradients->is_unfinished();
    return !entry->is_listed;
  });
}

/// A rank whose backward needs no value of a group that is reduced, as of a bias, gathers it, and what comes after it, as do the
/// ranks whose backward reads it: all call the same collectives. FSDP2 unshards each module before its backward.
void Schedule::gather_as_if_read(ScheduledGroup& entry, ParameterGroup& group) {
  if (std::exchange(entry.phase, phase_) == phase_) return;
  if (entry.prefetch->is_prefetched_in_backward) {
    if (group.is_stale()) group.reshard();
    open(group);
  }
  prefetch_after(group, AheadOf::kReduction, /*is_first_read=*/true);
}

void Schedule::finish_group(ScheduledGroup& entry) {
  const GroupPtr group = entry.group.lock();
  if (!group) return;
  gather_as_if_read(entry, *group);
  const bool waits = !is_last_backward_ && group->axes().keeps_gradients();
  if (entry.gradients->settings.sync() && !waits) {
    reductions_.start(entry, ready_);
  } else {
    entry.gradients->keep_unreduced();
  }
  if (!entry.gradients->settings.reshard_after_backward) return;
  entry.is_reduced = entry.gradients->leaves_out_any(); // the backward of a frozen layer reads it once more, perhaps
  if (!entry.is_reduced) group->reshard();
}

/// Of gradients to the host, once for all: the last one ends last.
void Schedule::wait_for_copies() {
  std::for_each(ready_.rbegin(), ready_.rend(), [](auto& each) {
    if (const auto copy = std::exchange(each.copy, nullptr)) copy->wait();
  });
}

void Schedule::finish_backward() {
  const StreamScope scope(compute_stream_);
  const auto finish = [&] {
    if (state_ != State::kBackward) return;
    reduce_the_rest();
    if (is_last_backward_) reductions_.finish(ready_);
    wait_for_copies();
    join_parts();
  };
  while (deliver_after(finish)) { // a backward of the same model in a hook makes more
  }
  const std::lock_guard lock(mutex_);
  if (state_ != State::kBackward) return;
  if (!watch_.is_done()) watch_.count_holders();
  for (const auto* entry : unfinished_) {
    if (!entry->group.expired()) entry->gradients->withhold_unreduced();
  }
  std::erase_if(open_, [](auto* entry) {
    const GroupPtr group = entry->group.lock();
    if (!group || !entry->gradients->settings.reshard_after_backward) return !group || !group->is_open();
    group->reshard();
    return true;
  });
  if (!iteration_.recording.empty()) {
    order_ = std::exchange(iteration_.recording, {});
    last_module_ = iteration_.newest_module;
  }
  enter(State::kIdle);
}

void Schedule::abandon_backward() {
  enter(State::kIdle);
  reductions_.drop();
  ready_.clear();
  std::vector<Work> in_flight;
  for (const auto& list : {order_, iteration_.recording, std::exchange(unfinished_, {})}) {
    for (auto* entry : list) {
      const GroupPtr group = entry->group.lock();
      if (!group) continue;
      in_flight.push_back(entry->gradients->discard());
      entry->is_listed = false;
    }
  }
  for (auto& work : in_flight) work.wait(); // which throws for a broken communicator, when nothing is left to forget
}

void Schedule::set_reporting(bool reports) {
  const std::lock_guard lock(mutex_);
  resources_->recorder = reports ? std::make_shared<StepRecorder>() : nullptr;
  if (reports) note_unsharded();
}

StepReport Schedule::report() {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(resources_->recorder, "report: nothing was recorded on rank ", process_context().rank(),
              ": call set_reporting(true) before the step");
  auto report = resources_->recorder->take();
  note_unsharded(); // what is gathered stays so in the next one
  return report;
}

void Schedule::look_anew() {
  const std::lock_guard lock(mutex_);
  for (auto& each : groups_) each.phase = 0;
}

void Schedule::refuse(std::string why) {
  const std::lock_guard lock(mutex_);
  refusal_ = std::move(why);
}

void Schedule::forget_failed_backward() {
  const std::lock_guard lock(mutex_);
  if (has_failed_backward()) abandon_backward();
}

void Schedule::start_unshard(ParameterGroup& group) {
  const std::lock_guard lock(mutex_);
  if (group.is_stale()) group.reshard();
  open(group);
  scheduled(group).is_held = true;
}

void Schedule::finish_unshard(ParameterGroup& group) {
  const std::lock_guard lock(mutex_);
  group.finish_gather();
}

void Schedule::unshard(ParameterGroup& group) {
  const std::lock_guard lock(mutex_);
  start_unshard(group);
  group.finish_gather();
}

void Schedule::reshard_after_forward(ParameterGroup& group) {
  const std::lock_guard lock(mutex_);
  group.reshard_after_forward();
  std::erase(open_, &scheduled(group));
}

void Schedule::reshard(ParameterGroup& group) {
  const std::lock_guard lock(mutex_);
  group.reshard();
  scheduled(group).is_held = false;
  std::erase(open_, &scheduled(group));
}

void Schedule::write_back(ParameterGroup& group, const UnshardedRange& written) {
  const std::lock_guard lock(mutex_);
  group.write_back(written);
}

} // namespace tessera::internal
