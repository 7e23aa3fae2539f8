#include "gpt/sharding.h"

namespace gpt {

tessera::ParallelPlan parallel_plan(bool sequence_parallel, bool has_experts) {
  using tessera::Colwise, tessera::Rowwise, tessera::Sequence, tessera::VocabParallel;
  using tessera::Placement, tessera::ParallelPlan, tessera::Shard, tessera::Replicate;
  const Placement stream = sequence_parallel ? Placement(Shard{1}) : Placement(Replicate{});
  ParallelPlan plan{{"token_embedding", VocabParallel{stream}},
                    {"blocks.*.attention.qkv", Colwise{.packed = 3}},
                    {"blocks.*.attention.projection", Rowwise{.output = stream}}};
  if (!has_experts) plan.insert(plan.end(), {{"blocks.*.expand", Colwise{}}, {"blocks.*.contract", Rowwise{.output = stream}}});
  if (sequence_parallel) plan.insert(plan.end(), {{"blocks.*.*_norm", Sequence{}}, {"norm", Sequence{}}});
  return plan;
}

namespace {

std::vector<std::string> names_without(const tessera::DeviceMesh& mesh, const std::string& left_out) {
  auto names = mesh.dim_names();
  std::erase(names, left_out);
  return names;
}

} // namespace

tessera::DeviceMesh split_experts(torch::nn::Module& module, const tessera::DeviceMesh& all, const Options& options) {
  if (options.model.experts == 0) return {};
  const auto tokens = all[names_without(all, "pp")];
  auto inner = tokens.dim_names(), outer = std::vector<std::string>{}; // replicas have copies of all experts
  if (inner.size() > (options.tensor_parallel ? 2U : 1U)) {
    outer.push_back(inner.front());
    inner.erase(inner.begin());
  }
  const auto experts = tessera::expert_mesh(tokens[inner], options.expert_ranks());
  tessera::expert_parallel(module, experts["ep"],
                           {.tokens = tokens, .tensor_parallel = options.tensor_parallel ? all["tp"] : tessera::DeviceMesh()});
  return outer.empty() ? experts["efsdp"] : tessera::DeviceMesh::concatenate({tokens[outer], experts["efsdp"]});
}

void shard_experts(torch::nn::Module& module, const tessera::DeviceMesh& same, const Options& options) {
  for (auto* layer : tessera::moe_layers(module)) examples::shard_module(*layer->experts(), same, options);
}

void shard(Gpt& model, const tessera::DeviceMesh& all, const Options& options) {
  auto mesh = all;
  const auto same = split_experts(*model, all, options);
  if (options.tensor_parallel) {
    tessera::parallelize(*model, all["tp"], parallel_plan(options.sequence_parallel, options.model.experts > 0),
                         {.overlap = {.when = options.overlap}});
    mesh = all[names_without(all, "tp")];
  }
  shard_experts(*model, same, options);
  // Without sharding, one call makes buckets that are reduced while the backward goes on.
  if (options.strategy != tessera::Strategy::kNoShard) {
    for (const auto& block : *model->blocks()) examples::shard_module(*block, mesh, options);
  }
  examples::shard_module(*model, mesh, options);
}

} // namespace gpt
