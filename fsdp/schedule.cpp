#include <tessera/fsdp/schedule.h>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include <tessera/fsdp/group_gradients.h>
#include <tessera/fsdp/parameter_group.h>
#include <tessera/fsdp/sharded_module.h>

namespace tessera::fsdp_internal {

namespace {

using GroupList = std::vector<std::weak_ptr<ParameterGroup>>;
using GroupPtr = std::shared_ptr<ParameterGroup>;

bool related(const ParameterGroup& a, const ParameterGroup& b) {
  return a.owner->is_self_or_ancestor_of(*b.owner) || b.owner->is_self_or_ancestor_of(*a.owner);
}

} // namespace

bool Schedule::enter_phase() {
  const bool backward = torch::autograd::get_current_graph_task_id() >= 0;
  if (backward && !in_backward_) begin_backward();
  if (!backward && in_backward_) abandon_backward();
  if (!backward && after_backward_) begin_forward();
  return backward;
}

void Schedule::begin_forward() {
  after_backward_ = false;
  ++forward_epoch_;
  ++phase_;
  recording_.clear();
}

void Schedule::begin_backward() {
  in_backward_ = true;
  ++phase_;
  const GroupList& list = recording_.empty() ? order_ : recording_;
  next_to_reduce_ = static_cast<int64_t>(list.size()) - 1;
  for (const auto& weak : list) {
    if (const GroupPtr group = weak.lock()) group->gradients().begin_backward();
  }
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->finish_backward();
  });
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
  const bool backward = enter_phase();
  if (group.is_stale()) group.reshard();
  if (!backward) record(group);
  if (group.is_unsharded() && group.phase == phase_) return;
  group.phase = phase_;
  const bool recomputes = backward && at::GradMode::is_enabled(); // its gradients come at once
  if (!recomputes) close_unrelated(group);
  open(group);
  group.finish_gather();
  prefetch_after(group);
}

void Schedule::touch_parameter(ParameterGroup& group, size_t index, bool expects_gradient) {
  const std::lock_guard lock(mutex_);
  touch(group);
  if (expects_gradient) group.expect_gradient(index, forward_epoch_);
}

void Schedule::record(ParameterGroup& group) {
  if (group.recorded_forward == forward_epoch_) return;
  group.prefetch_parameters();
  group.check_parameters_alive();
  if (recording_.empty()) {
    const ShardedModule* root = group.owner.get();
    while (root->parent()) root = root->parent().get();
    root->check_no_new_parameter();
  }
  group.recorded_forward = forward_epoch_;
  group.order_position = static_cast<int64_t>(recording_.size());
  recording_.push_back(group.weak_from_this());
}

void Schedule::open(ParameterGroup& group) {
  if (!group.copies() || group.is_open()) return;
  group.start_gather();
  open_.push_back(group.weak_from_this());
}

void Schedule::close_unrelated(const ParameterGroup& group) {
  std::erase_if(open_, [&](const auto& weak) {
    const GroupPtr other = weak.lock();
    if (!other || !other->is_open()) return true;
    const bool prefetched = !other->is_unsharded();
    const bool kept = std::find(kept_.begin(), kept_.end(), other.get()) != kept_.end();
    if (prefetched || kept || related(*other, group) || !other->owner->reshards_after_forward()) return false;
    other->reshard();
    return true;
  });
}

ParameterGroup* Schedule::neighbour(const ParameterGroup& group, int64_t step) const {
  const GroupList& list = in_backward_ && !recording_.empty() ? recording_ : order_;
  const auto at = [&](int64_t position) -> ParameterGroup* {
    return position >= 0 && position < static_cast<int64_t>(list.size()) ? list[static_cast<size_t>(position)].lock().get()
                                                                         : nullptr;
  };
  return at(group.order_position) == &group ? at(group.order_position + step) : nullptr;
}

void Schedule::prefetch_after(const ParameterGroup& group) {
  if (ParameterGroup* next = neighbour(group, in_backward_ ? -1 : 1)) {
    if (next->is_stale()) next->reshard();
    open(*next);
  }
}

void Schedule::land(ParameterGroup& group, size_t index, const at::Tensor& gradient) {
  const std::lock_guard lock(mutex_);
  enter_phase();
  list_unfinished(group);
  group.gradients().land(index, gradient);
  if (group.gradients().is_complete()) reduce_in_order();
}

void Schedule::land_sharded(ParameterGroup& group, size_t index, at::Tensor gradient) {
  const std::lock_guard lock(mutex_);
  group.gradients().add_sharded(index, std::move(gradient));
}

void Schedule::reduce_in_order() {
  const GroupList& list = recording_.empty() ? order_ : recording_;
  for (; next_to_reduce_ >= 0; --next_to_reduce_) {
    const GroupPtr group = list[static_cast<size_t>(next_to_reduce_)].lock();
    if (!group || group->touched_count() == 0) continue;
    if (!group->gradients().is_complete()) return; // its turn comes first on every rank
    start_reduce(*group);
  }
}

void Schedule::reduce_the_rest() {
  const GroupList& list = recording_.empty() ? order_ : recording_;
  std::vector<GroupPtr> rest;
  for (auto position = static_cast<int64_t>(list.size()) - 1; position >= 0; --position) {
    const GroupPtr group = list[static_cast<size_t>(position)].lock();
    if (group && group->gradients().has_pending()) rest.push_back(group);
  }
  // Then those of a graph from an earlier forward, in an order that is the same on every rank.
  const auto from_before = static_cast<std::ptrdiff_t>(rest.size());
  const auto listed = std::exchange(unfinished_, {});
  for (const auto& weak : listed) {
    const GroupPtr group = weak.lock();
    if (!group) continue;
    group->is_listed = false;
    const bool waits = group->gradients().has_pending();
    if (waits && std::find(rest.begin(), rest.end(), group) == rest.end()) rest.push_back(group);
  }
  std::sort(rest.begin() + from_before, rest.end(), [](const auto& a, const auto& b) { return a->number > b->number; });
  for (const auto& group : rest) start_reduce(*group);
  for (const auto& weak : listed) { // what accumulates without communication, or without the all-reduce, is for a later backward
    const GroupPtr group = weak.lock();
    if (group && group->gradients().is_unfinished()) list_unfinished(*group);
  }
}

void Schedule::list_unfinished(ParameterGroup& group) {
  if (!std::exchange(group.is_listed, true)) unfinished_.push_back(group.weak_from_this());
}

void Schedule::start_reduce(ParameterGroup& group) {
  if (group.gradients().requires_sync) {
    group.gradients().finish_reduce(); // the one before, when a group is reduced twice in a backward
    while (!reducing_.empty()) {
      const GroupPtr oldest = reducing_.front().lock();
      if (oldest) oldest->gradients().advance_reduce();
      if (oldest && oldest->axes().all_reduce() && reducing_.size() < 2) break;
      reducing_.erase(reducing_.begin());
      if (oldest) oldest->gradients().finish_reduce();
    }
    group.gradients().start_reduce();
    if (group.gradients().is_reducing()) reducing_.push_back(group.weak_from_this());
  } else {
    group.gradients().begin_backward();
  }
  if (group.gradients().reshard_after_backward) group.reshard();
}

void Schedule::finish_backward() {
  const std::lock_guard lock(mutex_);
  if (!in_backward_) return;
  reduce_the_rest();
  if (is_last_backward_) {
    for (const auto& weak : std::exchange(reducing_, {})) {
      if (const GroupPtr group = weak.lock()) group->gradients().finish_reduce();
    }
  }
  std::erase_if(open_, [](const auto& weak) {
    const GroupPtr group = weak.lock();
    if (!group || !group->gradients().reshard_after_backward) return !group || !group->is_open();
    group->reshard();
    return true;
  });
  if (!recording_.empty()) order_ = std::exchange(recording_, {});
  in_backward_ = false;
  after_backward_ = true;
  ++phase_;
}

void Schedule::abandon_backward() {
  in_backward_ = false;
  after_backward_ = true;
  reducing_.clear();
  for (const auto& list : {order_, recording_, std::exchange(unfinished_, {})}) {
    for (const auto& weak : list) {
      const GroupPtr group = weak.lock();
      if (!group) continue;
      group->gradients().discard();
      group->is_listed = false;
    }
  }
}

void Schedule::unshard(ParameterGroup& group) {
  const std::lock_guard lock(mutex_);
  if (group.is_stale()) group.reshard();
  open(group);
  group.finish_gather();
}

void Schedule::reshard(ParameterGroup& group) {
  const std::lock_guard lock(mutex_);
  group.reshard();
  std::erase_if(open_, [&](const auto& weak) { return weak.lock().get() == &group; });
}

void Schedule::write_back(ParameterGroup& group) {
  const std::lock_guard lock(mutex_);
  group.write_back();
}

} // namespace tessera::fsdp_internal
