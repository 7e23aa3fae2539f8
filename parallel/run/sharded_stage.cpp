#include <tessera/parallel/run/sharded_stage.h>

#include <tessera/fsdp/fully_shard.h>

namespace tessera::internal::pipeline {

ShardedStage::ShardedStage(const PipelineStage& stage, PipelineResidency residency) : residency_(residency) {
  for (const auto& module : stage.module->modules()) {
    if (is_sharded(*module)) modules_.push_back(fsdp(*module));
  }
  if (residency_ == PipelineResidency::kMicroBatch) return;
  for (auto& each : modules_) each.set_reshard_after_forward(false, /*recurse=*/false);
}

void ShardedStage::enter(PipelineWork work, bool reduces) {
  if (work == PipelineWork::kForward) return;
  const bool frees = reduces || residency_ == PipelineResidency::kMicroBatch;
  for (auto& each : modules_) {
    each.set_requires_gradient_sync(reduces, /*recurse=*/false);
    each.set_reshard_after_backward(frees, /*recurse=*/false);
    each.set_unshard_in_backward(work != PipelineWork::kWeightGradients); // which reads no parameter
  }
}

void ShardedStage::free() {
  for (auto& each : modules_) each.reshard();
}

void ShardedStage::leave() {
  for (auto& each : modules_) {
    each.set_requires_gradient_sync(true, /*recurse=*/false);
    each.set_reshard_after_backward(true, /*recurse=*/false);
    each.set_unshard_in_backward(true);
  }
}

} // namespace tessera::internal::pipeline
