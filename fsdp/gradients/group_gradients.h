#pragma once

// Internal: the gradients of one group, from the leaf to the sharded parameter.

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/collectives/work.h>
#include <tessera/fsdp/gradients/gradient_settings.h>
#include <tessera/fsdp/gradients/landed_gradients.h>
#include <tessera/fsdp/gradients/reduce_buffer.h>
#include <tessera/fsdp/group/parameter_group.h>
#include <tessera/fsdp/layout/group_layout.h>

namespace tessera::internal {

/// A sharded gradient on its way to its parameter.
struct ReadyGradient {
  std::shared_ptr<ParameterGroup> group;
  size_t index;
  at::Tensor value;
  std::shared_ptr<PendingCopy> copy = {}; ///< that the value waits for, on its way to the host; null for none
  bool is_part = false; ///< the same backward brings another one of this parameter, which is also read as a DTensor
};
using ReadyGradients = std::vector<ReadyGradient>;

/// Adds another one of the same parameter.
void add(ReadyGradient& sum, const ReadyGradient& part);

/// Runs the hooks of the parameter, and adds the gradient to the parameter's. Not under the schedule's lock: hooks are the
/// user's.
void deliver(ReadyGradient ready);

/// Which parameters of a group require a gradient, as the user set them.
std::vector<bool> trained_of(const ParameterGroup& group);
bool trains_any(const ParameterGroup& group);

/// The dtype in which a group's gradients are reduced, given which parameters take part.
at::ScalarType reduce_dtype_of(const ParameterGroup& group, const std::vector<bool>& takes_part);

/// Collects the gradients of one group in its reduce buffer, and reduces them.
///
/// Not thread-safe: the schedule's lock guards it. A reduction has three steps: `start_reduce` (the reduce-scatter),
/// `advance_reduce` (waits for it; starts the all-reduce of replicas, or the reduce-scatter between the groups of a hierarchical
/// strategy), `finish_reduce`.
class GroupGradients {
 public:
  /// `group` has its parameters already.
  explicit GroupGradients(ParameterGroup& group) : group_(group), buffer_(group), landed_(group.parameters().size()) {}
  ~GroupGradients();
  GroupGradients(const GroupGradients&) = delete;
  GroupGradients& operator=(const GroupGradients&) = delete;

  /// What is to come, and what has landed in this backward.
  LandedGradients& landed() { return landed_; }
  /// Copies a full gradient, times `weight`, into the reduce buffer, added to what this backward or gradient accumulation left
  /// there. A gradient of weight 0 counts as if this rank had none.
  void land(size_t index, const at::Tensor& gradient, double weight);
  /// The group is to be reduced in this backward even if nothing lands, unless it is frozen.
  void join_reduction();
  /// What landed in this backward stays unreduced, for a later one.
  void keep_unreduced();
  /// Some parameter takes no part: it is frozen.
  bool leaves_out_any() const { return leaves_out_any_; }
  /// The group waits to be reduced: for what landed now or was accumulated before, the last of it along the replicate axis only,
  /// or because it joins others.
  bool has_pending() const {
    return joins_ || pending_count_ > 0 || (partial_.defined() && settings.all_reduce() && !is_reducing());
  }
  /// Something is being reduced, or waits for that in this backward or a later one.
  bool is_unfinished() const { return joins_ || pending_count_ > 0 || is_reducing() || partial_.defined(); }

  ParameterGroup& group() const { return group_; }
  void start_reduce(ReadyGradients& ready);
  void advance_reduce();
  void finish_reduce(ReadyGradients& ready);
  bool is_reducing() const { return state_ != State::kIdle; }
  /// The next gradient makes a reduce buffer that is to be the only one.
  bool needs_only_buffer() const {
    return settings.has_only_buffer && !buffer_.is_allocated() && group_.stages().reduce_scatter();
  }
  /// After a backward: keeps optimizers from the parameters whose gradients wait for a reduction.
  void withhold_unreduced() const;

  /// Forgets what landed (after an exception in backward). Returns what is still in flight.
  Work discard();

  GradientSettings settings;
  /// An error while gradients reduced with another factor are in flight or wait for their all-reduce.
  void set_divide_factor(double factor);

 private:
  enum class State { kIdle, kFirst, kSecond }; ///< the collective in flight; the first also where there is none to wait for

  struct Reduction {
    ReduceInput input;
    at::Tensor output;
    at::Tensor partial, outer_input; ///< of the second collective
    std::vector<bool> used;          ///< by this rank
    Work first, second;              ///< the collectives that were started
    std::optional<c10::Stream> home; ///< of their memory, on a device
    bool has_second = false;         ///< it has been started
    bool is_partial = false;         ///< the second is left to a later backward
    bool is_divided = false;         ///< by the factor, in the first
  };

  void enter(State next);
  /// On a device, before the memory of a reduction that may be in flight is freed: its home waits.
  void wait_on_home();

  /// Moves `partial_` out, ordered on the current stream.
  at::Tensor take_partial();
  /// Goes on with the reduction of what an earlier backward left to the all-reduce.
  void take_up_partial();
  void prepare_layout();
  void prepare_buffer();
  void start_first();
  void start_second();
  /// The current stream may be another one than the memory's home. Then the home gets the memory back no earlier than the current
  /// stream has done with it.
  void wait_for_second();
  Work reduce_replicas();
  void finish_sum(const at::Tensor& reduced, bool is_divided) const;
  void zero_gaps(const at::Tensor& reduced) const;
  std::vector<bool> used_anywhere(const at::Tensor& reduced, std::vector<bool> used) const;
  /// The group's, and the parameters that take no part: ranks that froze different ones call different collectives.
  std::string label() const;
  /// The dtype of all parameters that require a gradient, where they share one.
  std::optional<at::ScalarType> common_dtype() const;
  ReadyGradient make_ready(size_t index, const at::Tensor& reduced) const;
  void add_whole(size_t index, const at::Tensor& gradient);
  void finish_alone(ReadyGradients& ready);
  /// Starts to move those from number `first` on to where the shards lie.
  void offload(ReadyGradients& ready, size_t first) const;
  bool reduces_alone() const;
  std::optional<double> divisor() const;
  double early_factor(const std::optional<double>& factor) const;
  double late_factor() const; ///< the rest of the divisor

  ParameterGroup& group_;
  std::vector<bool> takes_part_; ///< parameters that require a gradient
  bool leaves_out_any_ = false;
  std::string label_; ///< names the others
  ReduceLayout layout_;
  at::ScalarType dtype_ = at::kFloat;
  ReduceBuffer buffer_;
  std::vector<at::Tensor> whole_; ///< what landed, where nothing is reduced
  std::vector<bool> pending_;     ///< in the buffer or in `whole_`
  std::vector<bool> blank_;       ///< pending ones of weight 0 alone
  size_t pending_count_ = 0;
  LandedGradients landed_;
  bool joins_ = false; ///< the reductions of this backward, whether or not something landed

  State state_ = State::kIdle;
  Reduction reduction_;
  at::Tensor partial_;                      ///< reduced by the first collective only, waiting for the second (HSDP)
  std::optional<c10::Stream> partial_home_; ///< of its memory, on a device
};

} // namespace tessera::internal
