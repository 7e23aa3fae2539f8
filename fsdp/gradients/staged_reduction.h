#pragma once

// Internal: the reduction of a group's flat gradients over the ranks.

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <tessera/collectives/work.h>
#include <tessera/fsdp/gradients/gradient_division.h>
#include <tessera/fsdp/gradients/gradient_settings.h>
#include <tessera/fsdp/gradients/reduce_buffer.h>
#include <tessera/fsdp/group/parameter_group.h>
#include <tessera/fsdp/reduction_extension.h>

namespace tessera::internal {

/// What the stages before an all-reduce have summed, until a backward reduces it further.
struct ParkedSum {
  at::Tensor value;
  std::optional<c10::Stream> home = {}; ///< of its memory, on a device
};

/// How a reduction is to be made.
struct ReductionCall {
  std::string label;                                       ///< of its collectives
  at::ScalarType dtype;                                    ///< of the gradients
  std::vector<bool> used;                                  ///< the parameters that this rank used
  std::shared_ptr<ReductionExtension> extension = nullptr; ///< in place of the communicators' reductions; null for these
};

/// What a reduction has made.
struct ReducedSum {
  at::Tensor value;
  std::vector<bool> used; ///< by this rank
  bool is_divided;        ///< whether a collective has divided it already
  bool is_finished;       ///< by `finish_on`
};

/// Runs the stages of a group's reductions, one reduction at a time.
///
/// A part of the group's gradients. A reduction has three steps. `start` starts the stage that every backward
/// runs. `advance` waits for it and starts the rest, or parks what there is until a backward with an all-reduce. `finish` waits.
/// On a device with streams `start` launches all.
class StagedReduction {
 public:
  /// Both live as long as this.
  StagedReduction(ParameterGroup& group, const GradientSettings& settings) : group_(group), settings_(settings) {}
  ~StagedReduction();
  StagedReduction(const StagedReduction&) = delete;
  StagedReduction& operator=(const StagedReduction&) = delete;

  bool is_running() const { return std::holds_alternative<Running>(state_); }
  /// Whether nothing runs, and a sum waits for an all-reduce.
  bool is_parked() const { return std::holds_alternative<ParkedSum>(state_); }
  bool is_idle() const { return std::holds_alternative<Idle>(state_); }
  /// The sum that waits for an all-reduce, or is to be added in the reduction that runs; null for none.
  const at::Tensor* parked() const;
  /// The parameters that this rank used, of the reduction that runs; null for none.
  const std::vector<bool>* used() const;

  /// Starts to reduce `input`, and what is parked with it.
  void start(ReduceInput input, ReductionCall call);
  /// Goes on with what is parked.
  void resume(ReductionCall call);
  /// On a device where all was launched that a sum takes: calls `function` with it and whether it is divided, on `stream`, which
  /// waits for it there. Elsewhere nothing.
  void finish_on(const c10::Stream& stream, const std::function<void(const at::Tensor&, bool)>& function);
  void advance();
  /// The sum of all ranks; none where it is parked or nothing runs.
  std::optional<ReducedSum> finish();
  /// Forgets all. Returns what is still in flight.
  Work discard();

 private:
  struct Idle {};
  enum class Rest { kToStart, kStarted, kLeft }; ///< the stages after the first; left: to a later backward
  struct Running {
    ReductionCall call;
    ReduceInput input;
    std::optional<ParkedSum> earlier;
    std::optional<c10::Stream> home; ///< of the memory, on a device
    at::Tensor sum;                  ///< what the stages so far have made
    std::vector<at::Tensor> inputs;  ///< of the rest
    Work first, rest_work;
    Rest rest;
    bool is_divided;
    bool is_finished; ///< by `finish_on`, of which `rest_work` is
  };

  Running& begin(ReductionCall call);
  std::optional<ParkedSum> take_parked();
  void start_first(Running& running) const;
  void start_rest(Running& running) const;
  Work reduce_rest(Running& running) const;
  Work reduce_extended(Running& running, size_t stage, const at::Tensor& output, const at::Tensor& input) const;
  void start_rest_in_order(Running& running) const;
  void wait_for_rest(Running& running) const;
  void wait_on_home();

  ParameterGroup& group_;
  const GradientSettings& settings_;
  std::variant<Idle, Running, ParkedSum> state_;
};

} // namespace tessera::internal
