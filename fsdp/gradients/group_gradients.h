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
#include <tessera/fsdp/gradients/pending_gradients.h>
#include <tessera/fsdp/gradients/reduce_buffer.h>
#include <tessera/fsdp/gradients/staged_reduction.h>
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
  bool is_term = false; ///< of a sum over the ranks of tensor parallelism, which is made at the end of the backward
};
using ReadyGradients = std::vector<ReadyGradient>;

/// Adds another one of the same parameter.
void add(ReadyGradient& sum, const ReadyGradient& part);

/// Runs the hooks of the parameter, and adds the gradient to the parameter's. The hooks are the user's, and may wait for other
/// threads that use the model.
void deliver(ReadyGradient ready);

/// Which parameters of a group require a gradient, as the user set them.
std::vector<bool> trained_of(const ParameterGroup& group);
bool trains_any(const ParameterGroup& group);

/// The dtype in which a group's gradients are reduced, given which parameters take part.
at::ScalarType reduce_dtype_of(const ParameterGroup& group, const std::vector<bool>& takes_part);

/// Collects the gradients of one group in its reduce buffer, and has them reduced.
///
/// A model has it as a `Guarded` value. `start_reduce`, `advance_reduce` and `finish_reduce` are the steps of a
/// `StagedReduction`.
class GroupGradients {
 public:
  /// `group` has its parameters already.
  explicit GroupGradients(ParameterGroup& group)
      : group_(group),
        buffer_(group),
        pending_(group.parameters().size()),
        landed_(group.parameters().size()),
        reduction_(group, settings) {}
  ~GroupGradients() = default;
  GroupGradients(const GroupGradients&) = delete;
  GroupGradients& operator=(const GroupGradients&) = delete;

  /// What is to come, and what has landed in this backward.
  LandedGradients& landed() { return landed_; }
  const LandedGradients& landed() const { return landed_; }
  /// Copies a full gradient, times `weight`, into the reduce buffer, added to what this backward or gradient accumulation left
  /// there. A gradient of weight 0 counts as if this rank had none.
  void land(size_t index, const at::Tensor& gradient, double weight);
  /// The group is to be reduced in this backward even if nothing lands, unless it is frozen.
  void join_reduction();
  /// What landed in this backward stays unreduced, for a later one.
  void keep_unreduced();
  /// Some parameter takes no part: it is frozen.
  bool leaves_out_any() const { return plan_.leaves_out_any; }
  /// The group waits to be reduced: for what landed now or was accumulated before, the last of it along the replicate axis only,
  /// or because it joins others.
  bool has_pending() const { return must_reduce_ || pending_.any() || (reduction_.is_parked() && settings.all_reduce()); }
  /// Something is being reduced, or waits for that in this backward or a later one.
  bool is_unfinished() const { return must_reduce_ || pending_.any() || !reduction_.is_idle(); }

  ParameterGroup& group() const { return group_; }
  void start_reduce(ReadyGradients& ready);
  void advance_reduce() { reduction_.advance(); }
  void finish_reduce(ReadyGradients& ready);
  bool is_reducing() const { return reduction_.is_running(); }
  /// The next gradient makes a reduce buffer that is to be the only one.
  bool needs_only_buffer() const {
    return settings.has_only_buffer && !buffer_.is_allocated() && group_.stages().reduce_scatter();
  }
  /// After a backward: keeps optimizers from the parameters whose gradients wait for a reduction.
  void withhold_unreduced() const;

  /// The extension of the reductions, as of the parameters that require gradients now unless gradients are on their way; null for
  /// none.
  const std::shared_ptr<ReductionExtension>& reduction_extension();
  /// Forgets what landed (after an exception in backward). Returns what is still in flight.
  Work discard();

  GradientSettings settings;
  /// An error while gradients reduced with another factor are in flight or wait for their all-reduce.
  void set_divide_factor(double factor);

 private:
  /// What of a group is reduced, and how it lies.
  struct Plan {
    std::vector<bool> takes_part; ///< parameters that require a gradient
    bool leaves_out_any = false;
    std::string others; ///< names those that do not, in the label
    ReduceLayout layout;
    at::ScalarType dtype = at::kFloat;
    std::shared_ptr<ReductionExtension> extension; ///< null where the reductions are the communicators'
  };

  /// What is on its way, or waits for an all-reduce, lies as the layout says.
  bool can_change_layout() const { return !pending_.any() && !landed_.has_any() && reduction_.is_idle(); }
  void prepare_layout();
  void prepare_buffer();
  ReductionCall call_of(std::vector<bool> used) const;
  void call_hook_early();
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

  ParameterGroup& group_;
  Plan plan_;
  ReduceBuffer buffer_;
  std::vector<at::Tensor> whole_; ///< what landed, where nothing is reduced
  PendingGradients pending_;      ///< in the buffer or in `whole_`
  LandedGradients landed_;
  bool must_reduce_ = false; ///< the reductions of this backward, whether or not something landed
  StagedReduction reduction_;
};

} // namespace tessera::internal
