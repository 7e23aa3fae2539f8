#pragma once

// Internal: when the groups of one model gather, reshard and reduce.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/fsdp/buffers/unsharded_storage.h>
#include <tessera/fsdp/gradients/deliveries.h>
#include <tessera/fsdp/gradients/gradient_weights.h>
#include <tessera/fsdp/gradients/group_gradients.h>
#include <tessera/fsdp/group/model_lock.h>
#include <tessera/fsdp/group/model_resources.h>
#include <tessera/fsdp/group/parameter_group.h>
#include <tessera/fsdp/schedule/graph_task.h>
#include <tessera/fsdp/schedule/registration_watch.h>
#include <tessera/fsdp/schedule/scheduled_group.h>
#include <tessera/fsdp/schedule/step.h>
#include <tessera/fsdp/schedule/trains_apart_watch.h>
#include <tessera/fsdp/step_report.h>

namespace tessera::internal {

/// Performs the step of a model: tells `Step` of the reads and the gradients of its parameters, and does with its groups what
/// that decides. One for all groups below a root. A rank whose loss uses only some parameters of a group still reduces the whole
/// of it.
///
/// Thread-safe: the forward thread and autograd's threads call it. What takes a `Held` is called under its lock, by those who do
/// more under it; what takes none takes the lock.
class Schedule final : public std::enable_shared_from_this<Schedule>, private StepGroups {
 public:
  explicit Schedule(c10::Device device)
      : device_(device), resources_(std::make_shared<ModelResources>(device)), mutex_(resources_->mutex) {}
  /// The model's groups by their numbers, before the first event.
  void set_groups(std::vector<ScheduledGroup> groups);
  const std::vector<ScheduledGroup>& groups(const Held& /*held*/) const {
    mutex_.held();
    return groups_;
  }

  /// Makes the unsharded parameters of `group` valid for a read by an op that runs now.
  void read(ParameterGroup& group);
  /// The same, and expects a gradient of parameter `index`.
  void read_parameter(ParameterGroup& group, size_t index, bool expects_gradient);
  /// The full gradient of parameter `index` is there.
  void land(ParameterGroup& group, size_t index, const at::Tensor& gradient);
  /// One of an op that read the parameter as a DTensor, which needs no reduction.
  void land_sharded(ReadyGradient gradient);

  /// While it lives, a read of one of `groups` does not free the others: an op that reads parameters of several groups.
  class KeepOpen {
   public:
    KeepOpen(Schedule& schedule, const std::vector<ParameterGroup*>& groups);
    ~KeepOpen();
    KeepOpen(const KeepOpen&) = delete;
    KeepOpen& operator=(const KeepOpen&) = delete;

   private:
    Schedule& schedule_;
    std::vector<size_t> before_;
  };

  void start_unshard(ParameterGroup& group);
  /// Nothing for a group that was freed since.
  void finish_unshard(ParameterGroup& group);
  void unshard(ParameterGroup& group);
  void reshard(ParameterGroup& group);
  void reshard_after_forward(const Held& held, ParameterGroup& group);
  /// Copies a write to an unsharded parameter back to the shard.
  void write_back(ParameterGroup& group, const UnshardedRange& written);

  /// Why a phase of a micro-batch may not begin, in words that follow its name; empty if it may.
  std::string refusal_of(const MicroBatch& phase);
  /// Begins one that is not refused.
  void begin_phase(const MicroBatch& phase);
  /// Ends it, and reduces what it should have, where no backward ran in it.
  void end_phase(bool has_failed);
  /// Starts the gather that a phase which is to begin waits for first.
  void expect_phase(MicroBatchPhase phase);
  /// Forgets the micro-batches in flight.
  void give_up_micro_batches();

  /// Treats the next read of each group as its first in this phase, so that changed reshard settings take effect.
  void look_anew(const Held& held);
  /// Every read of the model's parameters is an error from now on, which says why.
  void refuse(std::string why);
  /// Drops what a backward left that ended with an exception. The events above do this by themselves.
  void forget_failed_backward();
  /// Drops the gradients of `group` that are not in `grad()` yet. Outside of a backward; every rank calls it.
  void drop_gradients(ParameterGroup& group);

  void set_is_last_backward(bool is_last) {
    const ModelLock lock(mutex_);
    step_.set_is_last_backward(is_last);
  }
  bool is_last_backward() const {
    const ModelLock lock(mutex_);
    return step_.is_last_backward();
  }
  /// Multiplies this rank's gradients by `weight` until `setter` forgets it. 0 drops them, NaN too.
  void set_gradient_weight(const void* setter, double weight) {
    const ModelLock lock(mutex_);
    gradient_weights_.set(setter, weight);
  }
  void forget_gradient_weight(const void* setter) {
    const ModelLock lock(mutex_);
    gradient_weights_.forget(setter);
  }
  /// What is set for the whole model on a schedule that this one replaces, perhaps among others.
  void take_settings(const Schedule& other);
  /// Starts to record anew what the model's groups do, or stops it.
  void set_reporting(bool reports);
  /// What was recorded, which begins again. An error while nothing is.
  StepReport report();
  /// What is known of the steps, for a prediction.
  const Step& step(const Held& /*held*/) const {
    mutex_.held();
    return step_;
  }
  /// The lock. Take it to change the settings of the model's groups.
  ModelMutex& mutex() const ABSL_LOCK_RETURNED(mutex_) { return mutex_; }
  const std::shared_ptr<ModelResources>& resources() const { return resources_; }

 private:
  static Residence residence_of(const ParameterGroup& group) {
    if (group.is_unsharded() || !group.needs_gather()) return Residence::kUnsharded;
    return group.is_open() ? Residence::kGathering : Residence::kSharded;
  }
  ScheduledGroup& scheduled(const ParameterGroup& group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return groups_[group.number]; }
  const ScheduledGroup& scheduled(const ParameterGroup& group) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return groups_[group.number];
  }
  GroupGradients& gradients_of(const ParameterGroup& group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return *scheduled(group).gradients_of(group, mutex_.held());
  }
  void read_locked(ParameterGroup& group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Begins or abandons what the event that happens now tells of; whether that belongs to a backward.
  bool follow(const ParameterGroup* read = nullptr) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void begin_forward() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void begin_backward() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void drop_ready_gradients();
  void watch_plain_leaves() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void finish_backward();
  /// Whether the backward that it follows has ended without its last callback.
  bool has_failed_backward() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void abandon_backward() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void check_not_stepped(ParameterGroup& group, size_t index);
  static void check_no_program(const ModelLock& lock, const ParameterGroup& group, size_t index);
  void note_forward(const ParameterGroup& group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void check_alive(const ParameterGroup& group) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void check_recorded(ScheduledGroup& entry, const ParameterGroup& group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void note_module(const ParameterGroup& group, bool is_first) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void check_unchanged(ScheduledGroup& entry, const ParameterGroup& group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  template <typename Locked>
  bool deliver_after(const Locked& locked) ABSL_LOCKS_EXCLUDED(mutex_);
  void deliver(ReadyGradients ready) ABSL_LOCKS_EXCLUDED(mutex_);
  void step_in_backward(ParameterGroup& group, const std::vector<size_t>& landed) ABSL_LOCKS_EXCLUDED(mutex_);
  static at::Tensor to_step(ParameterGroup& group, size_t index, int64_t backward);
  std::shared_ptr<EarlyParts> early_parts() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void take(EarlyParts& early);
  void hold_parts() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void note_unsharded() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // What the step asks and decides (schedule_actions.cpp).
  template <typename Function>
  auto of(size_t number, const Function& function) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  template <typename Visit> // void(ParameterGroup&, GroupGradients&)
  void for_each_part(size_t number, const Visit& visit) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    groups_[number].for_each_part(mutex_.held(), visit);
  }
  template <typename Holds>
  bool any_part(size_t number, const Holds& holds) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  GroupRules rules(size_t group) const override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return groups_[group].rules(mutex_.held());
  }
  Residence residence(size_t group) const override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool has_memory(size_t group) const override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool is_stale(size_t group) const override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<size_t> prefetch_list(size_t group, bool in_backward) const override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return groups_[group].prefetch_list(in_backward);
  }
  void gather(size_t group) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void wait(size_t group) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void free(size_t group) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void free_after_forward(size_t group) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void fetch(size_t group) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool expects_any(size_t group) const override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool is_complete(size_t group) const override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool awaits_any(size_t group) const override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool has_pending(size_t group) const override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool is_unfinished(size_t group) const override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool leaves_out_any(size_t group) const override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool is_in_inner_backward() const override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void forget_landed(size_t group) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void join_reduction(size_t group) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void keep_unreduced(size_t group) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void withhold_unreduced(size_t group) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool start_reduction(size_t group) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void advance_reduction(size_t group) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void finish_reduction(size_t group) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  c10::Device device_;
  /// The current stream of the last forward. Gradients are reduced and delivered on it, although autograd accumulates them on
  /// the stream that was current at fully_shard.
  std::optional<c10::Stream> compute_stream_;
  std::shared_ptr<ModelResources> resources_;
  ModelMutex& mutex_; // of `resources_`
  std::vector<ScheduledGroup> groups_ ABSL_GUARDED_BY(mutex_);
  Step step_ ABSL_GUARDED_BY(mutex_){*this};
  Deliveries deliveries_ ABSL_GUARDED_BY(mutex_);
  FollowedGraphTask graph_task_ ABSL_GUARDED_BY(mutex_); // of the backward
  GradientWeights gradient_weights_ ABSL_GUARDED_BY(mutex_);
  TrainsApartWatch watch_ ABSL_GUARDED_BY(mutex_);
  RegistrationWatch registrations_ ABSL_GUARDED_BY(mutex_);
  std::string refusal_ ABSL_GUARDED_BY(mutex_); // why no parameter may be used any more; empty: they may
};

} // namespace tessera::internal
