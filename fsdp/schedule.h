#pragma once

// Internal: when the groups of one model gather, reshard and reduce.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <tessera/fsdp/gradient_weights.h>
#include <tessera/fsdp/group_gradients.h>
#include <tessera/fsdp/model_resources.h>
#include <tessera/fsdp/parameter_group.h>
#include <tessera/fsdp/reduction_queue.h>
#include <tessera/fsdp/scheduled_group.h>
#include <tessera/fsdp/step_report.h>
#include <tessera/fsdp/trains_apart_watch.h>
#include <tessera/fsdp/unsharded_storage.h>

namespace tessera::internal {

/// The order of a model's collectives, driven by the reads and the gradients of its parameters. One for all groups below a root.
///
/// Forward: the first read of a group waits for its all-gather, starts the next group's in the order that the forward before
/// recorded, and frees every open group that is neither above nor below it, and what was gathered ahead for a read that this
/// forward has left out. Backward: the same in reverse order; a group whose gradients have all landed is reduced and freed.
/// Every rank starts reductions in the reverse order of the forward. The order in which gradients land does not change it. A rank
/// whose loss uses only some parameters of a group still reduces the whole of it.
///
/// Modules in buckets are reduced after the others, in the order of their parameters. All buckets of a module are reduced where
/// one has a gradient: another rank may use others, or read them in another order.
///
/// Thread-safe: the forward thread and autograd's threads call it.
class Schedule : public std::enable_shared_from_this<Schedule> {
 public:
  explicit Schedule(c10::Device device) : device_(device), resources_(std::make_shared<ModelResources>(device)) {}
  /// The model's groups by their numbers, before the first event.
  void set_groups(std::vector<ScheduledGroup> groups) { groups_ = std::move(groups); }

  /// Makes the unsharded parameters of `group` valid for a read by an op that runs now.
  void touch(ParameterGroup& group);
  /// The same, and expects a gradient of parameter `index`.
  void touch_parameter(ParameterGroup& group, size_t index, bool expects_gradient);
  /// The full gradient of parameter `index` is there.
  void land(ParameterGroup& group, size_t index, const at::Tensor& gradient);
  /// One of an op that read the parameter as a DTensor, which needs no reduction.
  void land_sharded(ReadyGradient gradient);

  /// While it lives, a touch of one of `groups` does not free the others: an op that reads parameters of several groups.
  class KeepOpen {
   public:
    KeepOpen(Schedule& schedule, std::vector<ParameterGroup*> groups);
    ~KeepOpen();
    KeepOpen(const KeepOpen&) = delete;
    KeepOpen& operator=(const KeepOpen&) = delete;

   private:
    Schedule& schedule_;
    std::vector<ParameterGroup*> before_;
  };

  void start_unshard(ParameterGroup& group);
  /// Nothing for a group that was freed since.
  void finish_unshard(ParameterGroup& group);
  void unshard(ParameterGroup& group);
  void reshard(ParameterGroup& group);
  void reshard_after_forward(ParameterGroup& group);
  /// Copies a write to an unsharded parameter back to the shard.
  void write_back(ParameterGroup& group, const UnshardedRange& written);

  /// Treats the next read of each group as its first in this phase, so that changed reshard settings take effect.
  void look_anew();
  /// Every read of the model's parameters is an error from now on, which says why.
  void refuse(std::string why);
  /// Drops what a backward left that ended with an exception. The events above do this by themselves.
  void forget_failed_backward();

  void set_is_last_backward(bool is_last) {
    const std::lock_guard lock(mutex_);
    is_last_backward_ = is_last;
  }
  bool is_last_backward() const { return is_last_backward_; }
  /// Multiplies this rank's gradients by `weight` until `setter` forgets it. 0 drops them, NaN too.
  void set_gradient_weight(const void* setter, double weight) {
    const std::lock_guard lock(mutex_);
    gradient_weights_.set(setter, weight);
  }
  void forget_gradient_weight(const void* setter) {
    const std::lock_guard lock(mutex_);
    gradient_weights_.forget(setter);
  }
  /// What is set for the whole model on a schedule that this one replaces, perhaps among others.
  void take_settings(const Schedule& other) {
    is_last_backward_ = is_last_backward_ && other.is_last_backward_;
    gradient_weights_.take(other.gradient_weights_);
  }
  /// From now on what the model's groups do is recorded, from nothing; or nothing is.
  void set_reporting(bool reports);
  /// What was recorded, which begins again. An error while nothing is.
  StepReport report();
  /// The groups that the last forward read, by their first reads; none before the first forward.
  std::vector<GroupPtr> read_order();
  /// For the settings of the model's groups. The calls above lock by themselves.
  [[nodiscard]] std::unique_lock<std::recursive_mutex> lock() { return std::unique_lock(mutex_); }
  const std::shared_ptr<ModelResources>& resources() const { return resources_; }

 private:
  using Order = std::vector<ScheduledGroup*>;
  enum class State { kIdle, kForward, kBackward };

  /// One forward and its backward.
  struct Iteration {
    Order recording;                            ///< of first reads in the forward
    size_t first_module = 0, newest_module = 0; ///< by `module_number`: the first that the forward read, and its latest new one
    bool has_read_last = false;                 ///< `last_module_`, since the model was looked at
    std::weak_ptr<void> graph_task;             ///< expired once that of the backward is gone
    int graph_task_id = -1;
    int64_t next_to_reduce = -1; ///< position in the forward order; all behind it have been reduced in the backward
  };

  /// What `land_sharded` holds of a graph task in which no backward has begun.
  struct EarlyParts {
    int graph_task_id;
    ReadyGradients parts;
  };

  ScheduledGroup& scheduled(const ParameterGroup& group) { return groups_[group.number]; }
  void touch_locked(ParameterGroup& group);
  void enter(State next);
  /// Begins or abandons what the event that happens now tells of; whether that belongs to a backward.
  bool follow(const ParameterGroup* read = nullptr);
  void begin_forward();
  void begin_backward();
  void drop_ready_gradients();
  void watch_plain_leaves();
  void finish_backward();
  /// Whether the backward that it follows has ended without its last callback.
  bool has_failed_backward() const;
  void abandon_backward();
  void note_forward(const ParameterGroup& group);
  void record(ParameterGroup& group);
  void record_module(const ParameterGroup& group, bool is_first);
  void check_unchanged(ScheduledGroup& entry, const ParameterGroup& group);
  void place_buckets();
  void place(ScheduledGroup& entry);
  void open(ParameterGroup& group);
  void note_unsharded();
  void close_unrelated(const ParameterGroup& group, uint64_t recomputation);
  /// After what others are gathered ahead. A reduction gathers none that its phase has read: they may have been freed for good.
  enum class AheadOf { kRead, kReduction };
  void prefetch_after(const ParameterGroup& group, AheadOf event, bool is_first_read);
  void prefetch(ParameterGroup& group, Ahead why);
  void list_unfinished(ScheduledGroup& entry);
  void join_buckets(const ScheduledGroup& landed);
  void reduce_in_order(const ScheduledGroup& landed);
  bool awaits_gradients(const ScheduledGroup& entry) const;
  bool may_join(const ScheduledGroup& entry);
  bool is_complete(const ScheduledGroup& entry) const;
  bool is_in_inner_backward() const;
  void reduce_the_rest();
  template <typename Locked>
  bool deliver_after(const Locked& locked);
  void wait_for_copies();
  ReadyGradients& early_parts();
  void take(EarlyParts& early);
  void hold_parts();
  void join_parts();
  void gather_as_if_read(ScheduledGroup& entry, ParameterGroup& group);
  void finish_group(ScheduledGroup& entry);
  int64_t known_position(const ScheduledGroup& entry) const; // -1: none
  bool is_passed(const ScheduledGroup& ahead, const ParameterGroup& group);
  std::span<ScheduledGroup> groups_of_module(const ScheduledGroup& entry) {
    return std::span(groups_).subspan(entry.module.first, entry.module.end - entry.module.first);
  }
  /// That of its first group: another rank may read another bucket.
  size_t module_number(const ParameterGroup& group) const { return groups_[group.number].module.first; }
  bool related(const ParameterGroup& a, const ParameterGroup& b) const;
  const Order& order() const { return iteration_.recording.empty() ? order_ : iteration_.recording; }
  /// The order in which this phase is expected to read the groups: the last forward's, or in backward the current one's.
  const Order& known_order() const { return state_ != State::kBackward && !order_.empty() ? order_ : order(); }
  /// The `step`-th group that this phase will need after `group`, as far as it is known; null when there is none. Before an
  /// order is known, it is guessed, at the first read of `group` in this phase alone.
  GroupPtr next_of(const ParameterGroup& group, int64_t step, bool is_first_read);

  c10::Device device_;
  /// The current stream of the last forward. Gradients are reduced and delivered on it, although autograd accumulates them on
  /// the stream that was current at fully_shard.
  std::optional<c10::Stream> compute_stream_;
  std::recursive_mutex mutex_;
  std::shared_ptr<ModelResources> resources_;
  std::vector<ScheduledGroup> groups_;
  Order order_;                       // of first reads in the last complete forward
  size_t last_module_ = 0;            // the newest one there; before it, of the forward that runs
  Order open_;                        // gathered, or about to be
  std::vector<ParameterGroup*> kept_; // by KeepOpen
  Order unfinished_;                  // with gradients that wait for their reduction, or did of late
  ReadyGradients ready_;              // reduced, to be delivered when the lock is released; on their way to the host, at the end
  std::weak_ptr<EarlyParts> early_parts_; // of the graph task that brought some last
  ReductionQueue reductions_;

  State state_ = State::kIdle;
  Iteration iteration_;
  bool is_last_backward_ = true;
  GradientWeights gradient_weights_;
  TrainsApartWatch watch_;
  std::string refusal_;          // why no parameter may be used any more; empty: they may
  uint64_t phase_ = 1;           // changes with the state
  uint64_t forward_epoch_ = 0;   // changes with every forward that follows a backward
  uint64_t checked_forward_ = 0; // the last one that an evaluation recorded, and whose model was looked at anew
};

} // namespace tessera::internal
