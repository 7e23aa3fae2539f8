#pragma once

// Internal: one step of a pipeline, as one rank performs it.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <tessera/parallel/run/pipeline_state.h>
#include <tessera/parallel/run/stage_graph.h>
#include <tessera/parallel/run/stage_run.h>
#include <tessera/parallel/run/step_times.h>

namespace tessera::internal::pipeline {

/// What a step is given.
struct StepInput {
  const std::vector<PipelineValue>& micro_batches;
  std::string key;                 ///< of the messages' shapes
  std::vector<std::string> shapes; ///< of the micro-batches
  double factor = 1;               ///< of the losses
  PipelineStepOptions options = {};
  StepTimes* times = nullptr; ///< where they are asked for
};

class StepRun {
 public:
  StepRun(PipelineState& state, const StepInput& input);

  /// Performs this rank's actions.
  void train(const PipelineSchedule& schedule);
  /// The forwards alone. The last stage's outputs are kept where no loss is asked for.
  void evaluate(bool wants_loss);

  /// The sum of the losses here, without dims.
  at::Tensor loss() const { return loss_; }
  std::vector<PipelineValue> take_outputs() { return std::move(outputs_); }
  /// What this rank does, or did when it threw: "in the loss of stage 1 (layer 'head'), micro-batch 2 of 4".
  std::string place() const;

 private:
  using Place = std::pair<int64_t, int64_t>; ///< a stage, a micro-batch
  struct Part {
    const char* what;           ///< "the loss"
    int64_t stage, micro_batch; ///< -1: of none
  };
  void note(const std::vector<PipelineAction>& actions);
  void perform(const PipelineAction& action);
  void gather_ahead(const std::vector<PipelineAction>& actions, size_t gather);
  void forward(const PipelineAction& action);
  void backward(const PipelineAction& action);
  void weight_gradients(const PipelineAction& action);
  void ask_ahead(const PipelineAction& now, const PipelineAction& next);

  void pass_on(StageRun& run, int64_t micro_batch, const PipelineValue& output);
  void take_loss(StageRun& run, int64_t micro_batch, const PipelineValue& output);
  void keep_loss(StageRun& run, int64_t micro_batch, const at::Tensor& sum);
  void check_graph(StageRun& run, int64_t micro_batch, const PipelineValue& input);

  bool is_last(int64_t stage) const { return stage + 1 == state_.stages.count(); }
  bool is_here(int64_t stage) const;
  /// The message that carries the outputs, or the gradients of the outputs, of `stage`.
  MessageName message(const char* what, int64_t stage, int64_t micro_batch, int64_t peer_stage) const;
  FlatValue received(Messages& messages, std::map<Place, Incoming>& asked, const MessageName& name, Place place);
  size_t index_of(int64_t stage) const; ///< among the local ones
  StageRun& run_of(int64_t stage) { return runs_[index_of(stage)]; }
  const ShardedStage& sharded_of(int64_t stage) const { return state_.sharded[index_of(stage)]; }
  MicroBatchScope scope_of(const PipelineAction& action);

  PipelineState& state_;
  const StepInput& input_;
  std::optional<Part> now_; ///< nothing between the actions
  ParameterNodes nodes_;
  std::vector<StageRun> runs_;                                 ///< as the local stages
  std::map<const torch::nn::Module*, int64_t> remaining_;      ///< backwards, and second halves, of what is one model
  std::set<Place> split_;                                      ///< whose backward comes in two halves
  std::map<Place, FlatValue> local_outputs_, local_gradients_; ///< from a stage of this rank to another
  std::map<Place, Incoming> asked_outputs_, asked_gradients_;
  std::set<std::string> not_split_;
  at::Tensor loss_;
  std::map<int64_t, at::Tensor> loss_roots_; ///< by micro-batch, undefined once their graph is kept
  std::vector<PipelineValue> outputs_;
};

} // namespace tessera::internal::pipeline
