#pragma once

// Internal: when the groups of one model gather, reshard and reduce.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include <tessera/fsdp/block_cache.h>

namespace tessera::fsdp_internal {

class ParameterGroup;

/// The order of a model's collectives, driven by the reads and the gradients of its parameters. One for all groups below a root.
///
/// Forward: the first read of a group waits for its all-gather, starts the next group's in the order that the forward before
/// recorded, and frees every open group that is neither above nor below it. Backward: the same in reverse order; a group whose
/// gradients have all landed is reduced and freed. Reductions start in reverse forward order on every rank, whatever the order in
/// which gradients land there.
///
/// Thread-safe: the forward thread and autograd's threads call it.
class Schedule : public std::enable_shared_from_this<Schedule> {
 public:
  explicit Schedule(c10::Device device) : cache_(std::make_shared<BlockCache>(device)) {}

  /// Makes the unsharded parameters of `group` valid for a read by an op that runs now.
  void touch(ParameterGroup& group);
  /// The same, and expects a gradient of parameter `index`.
  void touch_parameter(ParameterGroup& group, size_t index, bool expects_gradient);
  /// The full gradient of parameter `index` is there.
  void land(ParameterGroup& group, size_t index, const at::Tensor& gradient);
  /// A gradient of it that is a DTensor, and needs no reduction.
  void land_sharded(ParameterGroup& group, size_t index, at::Tensor gradient);

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

  void unshard(ParameterGroup& group);
  void reshard(ParameterGroup& group);
  /// Copies a write to an unsharded parameter back to the shard.
  void write_back(ParameterGroup& group);

  void set_is_last_backward(bool is_last) { is_last_backward_ = is_last; }
  const std::shared_ptr<BlockCache>& cache() const { return cache_; }

 private:
  bool enter_phase();
  void begin_forward();
  void begin_backward();
  void finish_backward();
  void abandon_backward();
  void record(ParameterGroup& group);
  void open(ParameterGroup& group);
  void close_unrelated(const ParameterGroup& group);
  void prefetch_after(const ParameterGroup& group);
  void reduce_in_order();
  void reduce_the_rest();
  void start_reduce(ParameterGroup& group);
  void list_unfinished(ParameterGroup& group);
  ParameterGroup* neighbour(const ParameterGroup& group, int64_t step) const;

  std::recursive_mutex mutex_;
  std::shared_ptr<BlockCache> cache_;
  std::vector<std::weak_ptr<ParameterGroup>> order_;     // of first reads in the last complete forward
  std::vector<std::weak_ptr<ParameterGroup>> recording_; // in the forward now
  std::vector<std::weak_ptr<ParameterGroup>> open_;
  std::vector<ParameterGroup*> kept_;                     // by KeepOpen
  std::vector<std::weak_ptr<ParameterGroup>> unfinished_; // with gradients that wait for their reduction, or did of late
  std::vector<std::weak_ptr<ParameterGroup>> reducing_;   // at most one reduce-scatter and one all-reduce in flight

  bool in_backward_ = false; // between the first event of a backward and its end
  bool after_backward_ = true;
  bool is_last_backward_ = true;
  int64_t next_to_reduce_ = -1; // position in the forward order; all behind it have been reduced in this backward
  uint64_t phase_ = 1;          // changes at every switch between forward and backward
  uint64_t forward_epoch_ = 0;  // changes with every forward that follows a backward
};

} // namespace tessera::fsdp_internal
