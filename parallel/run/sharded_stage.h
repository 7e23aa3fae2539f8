#pragma once

// Internal: what the sharded modules of a stage are told of a step.

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>

#include <tessera/fsdp/micro_batch.h>
#include <tessera/parallel/pipeline.h>

namespace tessera::internal::pipeline {

/// A stage that is a model of `fully_shard`, or a part of one with the other stages of its rank, where they share a weight. Also
/// one that is not sharded.
class ShardedStage {
 public:
  ShardedStage(const PipelineStages& stages, const PipelineStage& stage, Residency residency);

  /// The scope of an action of the stage. `is_last`: the gradients of the step are complete with it.
  MicroBatchScope enter(PipelineWork work, int64_t micro_batch, bool is_last) const;
  /// Starts the gathers that the next action of the stage will wait for first; none where its stages are one model, which knows
  /// only what comes next in all of it.
  void gather_ahead(PipelineWork next) const;
  void free() const;

  /// The module whose step is one.
  const std::shared_ptr<torch::nn::Module>& root() const { return root_; }

 private:
  std::shared_ptr<torch::nn::Module> module_, root_;
  Residency residency_;
  int64_t place_ = 0, places_ = 1; ///< among the stages of the root
};

} // namespace tessera::internal::pipeline
