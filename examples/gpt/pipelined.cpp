#include "gpt/pipelined.h"

#include <tessera/activations/recompute.h>
#include <tessera/parallel/pipeline_stages.h>

#include "common/sharding.h"
#include "gpt/sharding.h"

namespace gpt {

namespace {

using Pair = std::tuple<torch::Tensor, torch::Tensor>; // inputs and targets

tessera::PipelineLayers layers_of(Gpt& model, bool recomputes) {
  tessera::PipelineLayers layers(*model);
  auto* const gpt = model.get();
  layers.add("embed", {"token_embedding", "position_embedding"},
             [gpt](const Pair& batch) { return gpt->embed(std::get<0>(batch)); });
  layers.add_list("blocks", [recomputes](BlockImpl& block, const torch::Tensor& x) {
    return recomputes ? tessera::recompute(block, x) : block.forward(x);
  });
  layers.add("head", {"norm", "token_embedding.weight"}, [gpt](const torch::Tensor& x) { return gpt->logits(x); });
  layers.tie("token_embedding.weight");
  return layers;
}

/// The dims between the first and tp.
tessera::DeviceMesh data_mesh(const tessera::DeviceMesh& mesh, const Options& options) {
  auto names = mesh.dim_names();
  names.erase(names.begin());
  if (options.tensor_parallel) names.pop_back();
  return mesh[names];
}

int64_t stages_a_rank(tessera::PipelineScheduleKind kind) {
  using enum tessera::PipelineScheduleKind;
  return kind == kGPipe || kind == k1F1B || kind == kZeroBubbleH1 ? 1 : 2;
}

tessera::Pipeline make_pipeline(Gpt& model, const tessera::DeviceMesh& mesh, const Options& options) {
  const auto schedule = tessera::pipeline_schedule(
      options.schedule,
      {.ranks = mesh.size(0), .micro_batches = options.micro_batches, .chunks = stages_a_rank(options.schedule)});
  auto stages = tessera::split(layers_of(model, options.recompute), mesh["pp"], {.rank_of_stage = schedule.rank_of_stage});
  const bool has_experts = options.model.experts > 0;
  const auto same_experts = split_experts(*stages.module, mesh, options);
  if (options.tensor_parallel) {
    const auto plan = parallel_plan(options.sequence_parallel, has_experts);
    tessera::parallelize(stages, mesh["tp"], plan, {.overlap = {.when = options.overlap}});
  }
  shard_experts(*stages.module, same_experts, options);
  tessera::set_router_loss_scale(*stages.module, 1.0 / static_cast<double>(options.micro_batches));
  const auto data = data_mesh(mesh, options);
  tessera::fully_shard(stages, data, examples::shard_options(options));
  const tessera::PipelineLoss loss{
      .sum =
          [](const tessera::PipelineValue& logits, const tessera::PipelineValue& batch) {
            const auto& targets = std::get<1>(batch.to<Pair>());
            return cross_entropy(logits.toTensor(), targets) * targets.numel();
          },
      .count = [](const tessera::PipelineValue& batch) { return static_cast<double>(std::get<1>(batch.to<Pair>()).numel()); }};
  return {std::move(stages), schedule, loss, {.data_mesh = data}};
}

} // namespace

PipelinedGpt::PipelinedGpt(Gpt& model, const tessera::DeviceMesh& mesh, const Options& options)
    : micro_batches_(options.micro_batches), pipeline_(make_pipeline(model, mesh, options)) {}

torch::Tensor PipelinedGpt::train(const Batch& batch, const std::function<torch::Tensor(const torch::Tensor&)>& scale) {
  return pipeline_.step(micro_batches_of(batch), {.scale = scale});
}

tessera::StateDict PipelinedGpt::state(torch::optim::Optimizer& optimizer, bool saves) {
  auto state = tessera::state_dict(module(), optimizer, {.flatten_optimizer_state_dict = true});
  const auto& stages = pipeline_.stages();
  if (saves) state.erase_if([&](const auto& entry) { return stages.is_copy(entry.name); });
  return state;
}

std::vector<tessera::PipelineValue> PipelinedGpt::micro_batches_of(const Batch& batch) const {
  const auto inputs = batch.inputs.tensor_split(micro_batches_), targets = batch.targets.tensor_split(micro_batches_);
  std::vector<tessera::PipelineValue> all;
  for (size_t i = 0; i < inputs.size(); ++i) all.emplace_back(Pair(inputs[i], targets[i]));
  return all;
}

} // namespace gpt
