#include <tessera/plan/step/planned_mesh.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include <tessera/fsdp/fully_shard.h>
#include <tessera/parallel/expert_parallel.h>
#include <tessera/parallel/moe.h>
#include <tessera/parallel/parallelize.h>
#include <tessera/parallel/tensor/plan_lines.h>

namespace tessera::internal {

namespace {

using Names = std::vector<std::string>;

/// Returns those of `wanted` that the mesh has, in its order.
Names dims_of(const DeviceMesh& mesh, const Names& wanted) {
  Names dims;
  for (const auto& name : mesh.dim_names()) {
    if (std::find(wanted.begin(), wanted.end(), name) != wanted.end()) dims.push_back(name);
  }
  return dims;
}

DeviceMesh as_one(const DeviceMesh& mesh, const Names& dims) {
  const auto slice = mesh[dims];
  return dims.size() == 1 ? slice : slice.flatten();
}

/// The modules that are groups, inner ones first.
std::vector<parallel::NamedModule> grouped_modules(torch::nn::Module& module, const Names& patterns) {
  std::vector<parallel::NamedModule> found;
  for (const auto& each : parallel::modules_below(module)) {
    const auto is_named = [&](const std::string& pattern) { return parallel::matches(pattern, each.path); };
    if (each.path.empty() || each.module->parameters().empty()) continue;
    if (std::any_of(patterns.begin(), patterns.end(), is_named)) found.push_back(each);
  }
  const auto depth = [](const auto& each) { return std::count(each.path.begin(), each.path.end(), '.'); };
  std::stable_sort(found.begin(), found.end(), [&](const auto& a, const auto& b) { return depth(a) > depth(b); });
  return found;
}

/// Splits the experts, and shards those of each rank over the ranks that have the same ones.
void shard_experts(torch::nn::Module& module, const PlannedMesh& mesh, const FullyShardOptions& options) {
  const auto& sizes = mesh.settings.mesh;
  if (sizes.ep == 1) return;
  const auto tokens = mesh.of_a_stage();
  auto inner = tokens.dim_names();
  const bool has_replicas = inner.size() > 1 && inner.front() == "replicate";
  if (has_replicas) inner.erase(inner.begin());
  const auto experts = expert_mesh(tokens[inner], sizes.ep);
  expert_parallel(module, experts["ep"], {.tokens = tokens, .tensor_parallel = mesh.dim("tp")});
  const auto same = has_replicas ? DeviceMesh::concatenate({tokens["replicate"], experts["efsdp"]}) : experts["efsdp"];
  auto own = options;
  own.strategy.reset(); // full, or hybrid over replicas
  const ShardPlacementFn by_rows = [](const std::string&, const at::Tensor&) -> std::optional<Placement> { return Shard{1}; };
  for (auto* layer : moe_layers(module)) {
    const bool are_too_few = layer->options().experts / sizes.ep < experts["efsdp"].size(); // for each rank to have one
    own.shard_placement_fn = are_too_few ? by_rows : options.shard_placement_fn;
    fully_shard(*layer->experts(), same, own);
  }
}

/// None where nothing is tensor parallel. An error where the settings want of the model what it has not.
std::optional<ParallelPlan> tensor_plan(torch::nn::Module& module, const PlannedModel& model, const PlanSettings& settings) {
  const auto& sizes = settings.mesh;
  TORCH_CHECK_VALUE(sizes.tp == 1 || model.tensor_parallel, "plan: ", model.name, " cannot be tensor parallel, but tp is ",
                    sizes.tp);
  TORCH_CHECK_VALUE(sizes.ep == 1 || model.experts > 0, "plan: ", model.name, " has no experts, but ep is ", sizes.ep);
  if (sizes.tp == 1) return std::nullopt;
  return model.tensor_parallel(module, {.ranks = sizes.tp, .sequence = settings.sequence_parallel});
}

/// What `fully_shard` takes for the linear layers of `module` that multiply in fp8.
FullyShardOptions with_gathers(FullyShardOptions options, const torch::nn::Module& module, const PlanSettings& settings) {
  if (settings.float8_gather) options.gather_extension_fn = float8_gather(module);
  return options;
}

} // namespace

PlannedMesh::PlannedMesh(const PlanSettings& plan, c10::DeviceType device) : settings(plan) {
  const auto& sizes = settings.mesh;
  std::vector<int64_t> shape;
  Names names;
  const bool has_rows = sizes.replicate > 1 || sizes.shard > 1; // otherwise one dim of one rank has them
  const std::string rows = settings.strategy == Strategy::kNoShard ? "replicate" : "shard";
  for (const auto& [size, name] : {std::pair(sizes.pp, "pp"), std::pair(sizes.replicate, "replicate"),
                                   std::pair(sizes.shard, "shard"), std::pair(sizes.cp, "cp"), std::pair(sizes.tp, "tp")}) {
    if (size == 1 && (has_rows || name != rows)) continue;
    shape.push_back(size);
    names.emplace_back(name);
  }
  all = init_device_mesh(device, shape, names);
}

DeviceMesh PlannedMesh::shard() const {
  const auto inner = dims_of(all, {"shard", "cp"});
  if (row_of(settings.strategy).outer) return DeviceMesh::concatenate({all["replicate"], as_one(all, inner)});
  return as_one(all, dims_of(all, {"replicate", "shard", "cp"}));
}

DeviceMesh PlannedMesh::dim(const std::string& name) const {
  const auto& names = all.dim_names();
  return std::find(names.begin(), names.end(), name) == names.end() ? DeviceMesh() : all[name];
}

DeviceMesh PlannedMesh::of_a_stage() const {
  auto names = all.dim_names();
  std::erase(names, "pp");
  return all[names];
}

std::vector<std::string> planned_in_fp32() {
  return {"BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d"};
}

FullyShardOptions planned_options(const PlanSettings& settings, const std::string& folder) {
  FullyShardOptions options;
  options.strategy = settings.strategy;
  options.reshard_after_forward = settings.reshard_after_forward;
  options.layout = settings.layout;
  options.initial_weights = InitialWeights::kUnchecked;
  const bool is_mixed = settings.precision == PlanPrecision::kBf16Mixed;
  if (is_mixed || settings.precision == PlanPrecision::kDeepSpeed) {
    options.mixed_precision = {
        .param_dtype = at::kBFloat16, .reduce_dtype = is_mixed ? at::kFloat : at::kBFloat16, .keep_in_fp32 = planned_in_fp32()};
  }
  options.offload = {.memory = settings.offload, .pin_memory = false, .folder = folder};
  return options;
}

at::ScalarType planned_dtype(const PlanSettings& settings) {
  return settings.precision == PlanPrecision::kBf16Full ? at::kBFloat16 : at::kFloat;
}

void shard_planned(torch::nn::Module& module, const PlannedModel& model, const PlannedMesh& mesh,
                   const FullyShardOptions& given) {
  const auto& settings = mesh.settings;
  const auto options = with_gathers(given, module, settings);
  const auto groups = grouped_modules(module, model.groups); // before ways through parallelism change the tree
  const auto plan = tensor_plan(module, model, settings);
  shard_experts(module, mesh, options);
  if (plan) parallelize(module, mesh.dim("tp"), *plan);
  const auto dims = mesh.shard();
  // Without sharding, one call makes buckets that are reduced while the backward goes on.
  if (settings.strategy != Strategy::kNoShard) {
    for (const auto& group : groups) fully_shard(*group.module, dims, options);
  }
  fully_shard(module, dims, options);
}

void shard_planned(PipelineStages& stages, torch::nn::Module& module, const PlannedModel& model, const PlannedMesh& mesh,
                   const FullyShardOptions& given) {
  const auto options = with_gathers(given, module, mesh.settings);
  const auto plan = tensor_plan(module, model, mesh.settings);
  shard_experts(*stages.module, mesh, options);
  if (plan) parallelize(stages, mesh.dim("tp"), *plan);
  fully_shard(stages, mesh.shard(), options);
}

} // namespace tessera::internal
