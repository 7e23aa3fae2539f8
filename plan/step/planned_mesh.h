#pragma once

// Internal: the meshes of a plan's settings, and what `fully_shard` is told.

#include <string>
#include <vector>

#include <tessera/fsdp/options.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/parallel/pipeline_stages.h>
#include <tessera/plan/planned_model.h>
#include <tessera/plan/settings.h>

namespace tessera::internal {

/// The dims of a job, as `TrainConfig::make_mesh` names and orders them.
struct PlannedMesh {
  PlannedMesh(const PlanSettings& settings, c10::DeviceType device);

  /// The dims whose ranks hold a whole model together, as the strategy wants them.
  DeviceMesh shard() const;
  /// One dim, undefined where it has one rank.
  DeviceMesh dim(const std::string& name) const;
  /// All dims but pp.
  DeviceMesh of_a_stage() const;

  PlanSettings settings;
  DeviceMesh all;
};

/// The modules whose kernels cannot mix dtypes.
std::vector<std::string> planned_in_fp32();
/// `folder` is that of an offload to files.
FullyShardOptions planned_options(const PlanSettings& settings, const std::string& folder = {});
/// The dtype of the parameters that the optimizer steps.
at::ScalarType planned_dtype(const PlanSettings& settings);

/// `expert_parallel`, `parallelize` and `fully_shard` of a model, in this order, as the settings say.
void shard_planned(torch::nn::Module& module, const PlannedModel& model, const PlannedMesh& mesh,
                   const FullyShardOptions& options);
/// Does the same with the stages of a pipeline, which were split from `module`.
void shard_planned(PipelineStages& stages, torch::nn::Module& module, const PlannedModel& model, const PlannedMesh& mesh,
                   const FullyShardOptions& options);

} // namespace tessera::internal
