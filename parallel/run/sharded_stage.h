#pragma once

// Internal: what the sharded modules of a stage are told of a step.

#include <vector>

#include <tessera/fsdp/fsdp_module.h>
#include <tessera/parallel/pipeline.h>

namespace tessera::internal::pipeline {

class ShardedStage {
 public:
  ShardedStage(const PipelineStage& stage, PipelineResidency residency);

  /// Is called before an action of the stage. `reduces`: the stage's gradients of the step are complete with it.
  void enter(PipelineWork work, bool reduces);
  void free();
  /// Is called after the step, however it ended.
  void leave();

 private:
  std::vector<FSDPModule> modules_;
  PipelineResidency residency_;
};

} // namespace tessera::internal::pipeline
