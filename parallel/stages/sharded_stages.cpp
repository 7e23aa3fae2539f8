#include <c10/util/Exception.h>

#include <algorithm>
#include <set>

#include <tessera/collectives/process_context.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/parallel/moe.h>
#include <tessera/parallel/parallelize.h>
#include <tessera/parallel/pipeline_stages.h>
#include <tessera/parallel/stages/names.h>
#include <tessera/parallel/stages/shared_weights.h>
#include <tessera/parallel/tensor/plan_lines.h>

namespace tessera {

using internal::pipeline::ModelNames;

namespace {

/// Both copies of a tied weight must be cut alike, whatever else is beside them: each parameter by itself.
void shard_ties(const PipelineStages& stages, const PipelineStage& stage, const ModelNames& names, const DeviceMesh& mesh,
                FullyShardOptions options) {
  options.layout = BufferLayout::kPerParameter;
  for (const auto& tie : stages.ties) {
    if (std::count(tie.stages.begin(), tie.stages.end(), stage.index) == 0) continue;
    const auto& holder = names.modules.at(std::string(internal::pipeline::folder_of(tie.name)));
    if (!is_sharded(*holder)) fully_shard(*holder, mesh, options);
  }
}

/// The modules of the layer's members, those that are sharded already without.
std::vector<std::shared_ptr<torch::nn::Module>> modules_of(const PipelineLayers::Layer& layer, const ModelNames& names) {
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
  for (const auto& member : layer.members) {
    const auto found = names.modules.find(member);
    if (found != names.modules.end() && !is_sharded(*found->second)) modules.push_back(found->second);
  }
  return modules;
}

} // namespace

void fully_shard(const PipelineStages& stages, const DeviceMesh& mesh, const FullyShardOptions& options) {
  const bool is_one_model = internal::pipeline::stages_share_weights(stages);
  for (const auto& stage : stages.local) {
    const ModelNames names(*stage.module);
    shard_ties(stages, stage, names, mesh, options);
    for (auto layer = stage.begin; layer < stage.end; ++layer) {
      const auto modules = modules_of(stages.layers.layers()[static_cast<size_t>(layer)], names);
      if (!modules.empty()) fully_shard(modules, mesh, options);
    }
    if (!is_one_model) fully_shard(*stage.module, mesh, options);
  }
  if (is_one_model) fully_shard(*stages.module, mesh, options);
}

void expert_parallel(const PipelineStages& stages, const DeviceMesh& mesh, const ExpertParallelOptions& options) {
  TORCH_CHECK_VALUE(!moe_layers(stages.layers.model()).empty(), "expert_parallel: no layer of the pipeline's model is an MoE");
  if (!moe_layers(*stages.module).empty()) expert_parallel(*stages.module, mesh, options);
}

void parallelize(const PipelineStages& stages, const DeviceMesh& mesh, const ParallelPlan& plan,
                 const ParallelizeOptions& options) {
  const auto here = internal::parallel::modules_below(*stages.module);
  const auto all = internal::parallel::modules_below(stages.layers.model());
  ParallelPlan lines;
  for (const auto& line : plan) {
    internal::parallel::modules_of(line, all); // an error where none has such a name
    const bool is_here = std::any_of(here.begin(), here.end(),
                                     [&](const auto& each) { return internal::parallel::matches(line.modules, each.path); });
    if (is_here) lines.push_back(line);
  }
  parallelize(*stages.module, mesh, lines, options);
}

} // namespace tessera
