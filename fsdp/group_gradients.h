#pragma once

// Internal: the gradients of one group, from the leaf to the sharded parameter.

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/collectives/work.h>
#include <tessera/fsdp/group_layout.h>
#include <tessera/fsdp/node_reference.h>

namespace tessera::fsdp_internal {

class ParameterGroup;

/// Makes the gradients of `leaf` land in the schedule as soon as autograd has accumulated them, and sends there as well those
/// that reach `parameter` itself (as an argument of a torch::autograd::Function): both share the returned node, which the caller
/// keeps.
NodeReference redirect_gradients(const at::Tensor& parameter, const at::Tensor& leaf, const std::weak_ptr<ParameterGroup>& group,
                                 size_t index);

/// What stands for the parameter in an op that mixes it with other DTensors in grad mode: their gradients are DTensors, and need
/// no reduction.
at::Tensor make_dtensor_leaf(const at::Tensor& parameter, const std::weak_ptr<ParameterGroup>& group, size_t index);

/// Collects the gradients of one group in its reduce buffer, reduces them, and sets the sharded gradients.
///
/// Not thread-safe: the schedule's lock guards it. A reduction has three steps, collective over the shard axis, then the
/// replicate axis: `start_reduce`, `advance_reduce` (waits for the reduce-scatter, starts the all-reduce), `finish_reduce`.
class GroupGradients {
 public:
  explicit GroupGradients(ParameterGroup& group) : group_(group) {}

  /// Copies a full gradient into the reduce buffer, added to what this backward or gradient accumulation left there.
  void land(size_t index, const at::Tensor& gradient);
  /// Adds a gradient that is sharded already to the parameter's, and runs the hooks of the parameter.
  void add_sharded(size_t index, at::Tensor gradient);
  /// Every touched parameter's gradient has landed in this backward.
  bool is_complete() const;
  bool has_landed() const { return landed_count_ > 0; }
  /// Something waits to be reduced: landed now or accumulated before, the last of it along the replicate axis only.
  bool has_pending() const { return pending_count_ > 0 || (partial_.defined() && requires_all_reduce && !reducing_); }
  /// Something is being reduced, or waits for that in this backward or a later one.
  bool is_unfinished() const { return pending_count_ > 0 || reducing_ || partial_.defined(); }
  /// Another backward begins: what landed before counts no longer towards `is_complete`.
  void begin_backward();

  void start_reduce();
  void advance_reduce();
  void finish_reduce();
  bool is_reducing() const { return reducing_; }

  /// Forgets what landed (after an exception in backward).
  void discard();

  bool requires_sync = true;
  bool requires_all_reduce = true;
  bool reshard_after_backward = true;
  /// An error while gradients are reduced otherwise.
  void set_divide_factor(double factor);

 private:
  struct Reduction {
    at::Tensor input, output;
    std::vector<bool> used; ///< by this rank
    Work work;
    bool all_reduces = false;
  };

  /// The all-reduce of what an earlier backward left.
  void finish_partial();
  void prepare_layout();
  void prepare_buffer();
  void copy_into_buffer(size_t index, const at::Tensor& gradient, bool add);
  void write_used_flags();
  /// As the user set it, also where this rank did not read the parameter since.
  bool requires_grad(size_t index) const;
  /// The group's, and the parameters that take no part: ranks that froze different ones call different collectives.
  std::string label() const;
  at::ScalarType choose_reduce_dtype() const;
  /// The dtype of all parameters that require a gradient, where they share one.
  std::optional<at::ScalarType> common_dtype() const;
  void add_reduced(size_t index, const at::Tensor& reduced);
  void add_whole(size_t index, const at::Tensor& gradient);
  void finish_alone();
  bool reduces_alone() const;

  ParameterGroup& group_;
  std::vector<bool> takes_part_; ///< parameters that require a gradient
  std::string label_;            ///< names the others
  std::optional<double> divide_factor_;
  ReduceLayout layout_;
  at::ScalarType dtype_ = at::kFloat;
  at::Tensor buffer_;             ///< input of the reduce-scatter, [ranks × chunk_numel]
  std::vector<at::Tensor> whole_; ///< what landed, where nothing is reduced
  std::vector<bool> pending_;     ///< in the buffer or in `whole_`
  std::vector<bool> landed_;      ///< in this backward
  size_t pending_count_ = 0, landed_count_ = 0;

  bool reducing_ = false;
  Reduction reduction_;
  at::Tensor partial_; ///< reduced over the shard axis only, waiting for an all-reduce (HSDP)
};

} // namespace tessera::fsdp_internal
