#include <tessera/parallel/run/sharded_stage.h>

#include <c10/util/Exception.h>

#include <tessera/fsdp/fully_shard.h>
#include <tessera/parallel/stages/shared_weights.h>

namespace tessera::internal::pipeline {

namespace {

MicroBatchPhase phase_of(PipelineWork work) {
  switch (work) {
    case PipelineWork::kForward: return MicroBatchPhase::kForward;
    case PipelineWork::kBackward: return MicroBatchPhase::kBackward;
    case PipelineWork::kInputGradients: return MicroBatchPhase::kInputGradients;
    case PipelineWork::kWeightGradients: return MicroBatchPhase::kWeightGradients;
    case PipelineWork::kUnshard:
    case PipelineWork::kReshard: break;
  }
  TORCH_INTERNAL_ASSERT(false, "no phase of a micro-batch");
}

} // namespace

ShardedStage::ShardedStage(const PipelineStages& stages, const PipelineStage& stage, Residency residency)
    : module_(stage.module), root_(stage.module), residency_(residency) {
  if (!stages_share_weights(stages)) return;
  // One step of one model: a micro-batch counts once for each stage.
  root_ = stages.module;
  place_ = &stage - stages.local.data();
  places_ = std::ssize(stages.local);
}

MicroBatchScope ShardedStage::enter(PipelineWork work, int64_t micro_batch, bool is_last) const {
  return micro_batch_scope(
      *root_, {.index = micro_batch * places_ + place_, .phase = phase_of(work), .is_last = is_last, .residency = residency_});
}

void ShardedStage::gather_ahead(PipelineWork next) const {
  if (root_ == module_) tessera::gather_ahead(*root_, phase_of(next));
}

void ShardedStage::free() const {
  for (const auto& module : module_->modules()) {
    if (is_sharded(*module)) fsdp(*module).reshard();
  }
}

} // namespace tessera::internal::pipeline
