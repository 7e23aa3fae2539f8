// A plan as a trainer's config.
#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <utility>

#include <tessera/plan/search.h>
#include <tessera/plan/step/planned_mesh.h>

namespace tessera {

namespace {

using nlohmann::ordered_json;

int64_t stage_of(Strategy strategy) {
  switch (strategy) {
    case Strategy::kNoShard: return 0;
    case Strategy::kZero1: return 1;
    case Strategy::kZero2: return 2;
    case Strategy::kFullShard:
    case Strategy::kHybridShard:
    case Strategy::kHierarchical: break;
  }
  return 3;
}

ordered_json optimizer_of(const std::string& name) {
  ordered_json params{{"lr", 1e-3}};
  if (name == "Momentum") params["momentum"] = 0.9;
  if (name == "Adam") params["adam_w_mode"] = false;
  return {{"type", name == "Momentum" ? "SGD" : name}, {"params", params}};
}

ordered_json mesh_of(const PlanMesh& mesh) {
  ordered_json dims = ordered_json::object();
  for (const auto& [size, name] : {std::pair(mesh.pp, "pp"), std::pair(mesh.replicate, "replicate"),
                                   std::pair(mesh.shard, "shard"), std::pair(mesh.cp, "cp"), std::pair(mesh.tp, "tp")})
    dims[name] = size;
  return dims;
}

ordered_json reshard_of(const ReshardAfterForward& reshard) {
  return reshard.ranks() ? ordered_json(*reshard.ranks()) : ordered_json(static_cast<bool>(reshard));
}

ordered_json zero_of(const PlanSettings& settings) {
  ordered_json zero{{"stage", stage_of(settings.strategy)}};
  if (settings.offload == OffloadPolicy::Memory::kDevice) return zero;
  TORCH_CHECK_VALUE(settings.offload == OffloadPolicy::Memory::kHost,
                    "config_of: a config of an offload to files needs a folder, which a plan does not know");
  zero["offload_optimizer"] = {{"device", "cpu"}};
  if (stage_of(settings.strategy) == 3) zero["offload_param"] = {{"device", "cpu"}};
  return zero;
}

ordered_json pipeline_of(const PlanSettings& settings) {
  const auto& names = pipeline_schedule_names();
  const auto is_it = [&](const auto& each) { return each.kind == settings.schedule; };
  return {{"schedule", std::find_if(names.begin(), names.end(), is_it)->name},
          {"chunks", settings.chunks},
          {"resident_stages", settings.resident_stages}};
}

} // namespace

std::string config_of(const Prediction& prediction) {
  const auto& settings = prediction.settings;
  TORCH_CHECK_VALUE(settings.mesh.ep == 1, "config_of: a config has no experts' ranks, but ep is ", settings.mesh.ep);
  TORCH_CHECK_VALUE(settings.keeps == RecomputeKeeps::kNothing,
                    "config_of: a config has no key for what a recomputation keeps: the program says that");
  TORCH_CHECK_VALUE(!settings.float8, "config_of: a config has no key for products in fp8: the program calls convert_to_float8");
  ordered_json own{{"strategy", row_of(settings.strategy).name},
                   {"mesh", mesh_of(settings.mesh)},
                   {"layout", settings.layout == BufferLayout::kRagged ? "ragged" : "per-parameter"},
                   {"precision", to_string(settings.precision)},
                   {"recompute", settings.recompute},
                   {"sequence_parallel", settings.sequence_parallel}};
  if (settings.precision == PlanPrecision::kBf16Mixed || settings.precision == PlanPrecision::kDeepSpeed)
    own["keep_in_fp32"] = internal::planned_in_fp32();
  if (settings.reshard_after_forward) own["reshard_after_forward"] = reshard_of(*settings.reshard_after_forward);
  if (settings.mesh.pp > 1) own["pipeline"] = pipeline_of(settings);
  return ordered_json{{"train_batch_size", settings.global_rows()},
                      {"train_micro_batch_size_per_gpu", settings.rows},
                      {"gradient_accumulation_steps", settings.accumulation},
                      {"gradient_clipping", settings.max_grad_norm},
                      {"optimizer", optimizer_of(settings.optimizer)},
                      {"zero_optimization", zero_of(settings)},
                      {"tessera", own}}
      .dump(2);
}

std::string Plan::to_config() const {
  TORCH_CHECK_VALUE(best, "plan: nothing fits ", budget, " bytes a rank, so that there is no config",
                    smallest ? c10::str("; the smallest setting needs ", smallest->peak()) : std::string());
  return config_of(*best);
}

} // namespace tessera
