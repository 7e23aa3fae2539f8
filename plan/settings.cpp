#include <tessera/plan/settings.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <utility>

#include <tessera/base/edit_distance.h>

namespace tessera {

namespace {

constexpr std::array<std::pair<PlanPrecision, std::string_view>, 4> kPrecisions{{{PlanPrecision::kFp32, "fp32"},
                                                                                 {PlanPrecision::kBf16Mixed, "bf16_mixed"},
                                                                                 {PlanPrecision::kDeepSpeed, "deepspeed"},
                                                                                 {PlanPrecision::kBf16Full, "bf16_full"}}};

void check_positive(int64_t value, const char* name) {
  TORCH_CHECK_VALUE(value >= 1, "plan settings: ", name, " is ", value, ", but must be positive");
}

std::string text_of(const PlanMesh& mesh) {
  std::string text;
  for (const auto& [size, name] :
       {std::pair(mesh.pp, "pp"), std::pair(mesh.replicate, "replicate"), std::pair(mesh.shard, "shard"),
        std::pair(mesh.cp, "cp"), std::pair(mesh.tp, "tp"), std::pair(mesh.ep, "ep")}) {
    if (size > 1) text += fmt::format("{}{} {}", text.empty() ? "" : " x ", name, size);
  }
  return text.empty() ? "1 rank" : text;
}

} // namespace

const std::vector<std::string>& plan_optimizers() {
  static const std::vector<std::string> names{"AdamW", "Adam",      "SGD",       "Momentum", "Lion",
                                              "Lamb",  "Adafactor", "AdamW8bit", "Muon"};
  return names;
}

std::string_view to_string(PlanPrecision precision) { return kPrecisions.at(static_cast<size_t>(precision)).second; }

PlanPrecision plan_precision(std::string_view name) {
  const auto found = std::find_if(kPrecisions.begin(), kPrecisions.end(), [&](const auto& each) { return each.second == name; });
  TORCH_CHECK_VALUE(found != kPrecisions.end(), "plan settings: precision is \"", name,
                    "\", but must be fp32, bf16_mixed, deepspeed or bf16_full");
  return found->first;
}

std::string PlanSettings::to_string() const {
  std::vector<std::string> parts{
      std::string(row_of(strategy).name), text_of(mesh),
      fmt::format("{} row{}{}", rows, rows == 1 ? "" : "s", accumulation == 1 ? "" : fmt::format(" x {}", accumulation)),
      std::string(tessera::to_string(precision))};
  if (layout == BufferLayout::kPerParameter) parts.emplace_back("per-parameter");
  if (reshard_after_forward && !reshard_after_forward->ranks())
    parts.emplace_back(*reshard_after_forward ? "freed after forward" : "kept after forward");
  if (reshard_after_forward && reshard_after_forward->ranks())
    parts.push_back(fmt::format("over {} after forward", *reshard_after_forward->ranks()));
  if (recompute) parts.emplace_back(keeps == RecomputeKeeps::kNothing ? "recompute" : "selective recompute");
  if (float8) parts.emplace_back(*float8 == Float8Scaling::kTensor ? "fp8" : "fp8 by rows");
  if (float8_gather) parts.emplace_back("gathered in fp8");
  if (sequence_parallel) parts.emplace_back("sequence parallel");
  if (context_order == PartOrder::kContiguous) parts.emplace_back("contiguous sequences");
  if (offload == OffloadPolicy::Memory::kHost) parts.emplace_back("offload to the host");
  if (offload == OffloadPolicy::Memory::kFiles) parts.emplace_back("offload to files");
  if (mesh.pp > 1) {
    const auto& names = pipeline_schedule_names();
    parts.emplace_back(std::find_if(names.begin(), names.end(), [&](const auto& each) { return each.kind == schedule; })->name);
  }
  if (resident_stages > 0) parts.push_back(fmt::format("{} stage{} gathered", resident_stages, resident_stages == 1 ? "" : "s"));
  parts.push_back(optimizer);
  return fmt::format("{}", fmt::join(parts, ", "));
}

void PlanSettings::check() const {
  for (const auto& [size, name] : {std::pair(mesh.pp, "pp"), std::pair(mesh.replicate, "replicate"),
                                   std::pair(mesh.shard, "shard"), std::pair(mesh.cp, "cp"), std::pair(mesh.tp, "tp"),
                                   std::pair(mesh.ep, "ep"), std::pair(rows, "rows"), std::pair(accumulation, "accumulation")})
    check_positive(size, name);
  TORCH_CHECK_VALUE(recompute || keeps == RecomputeKeeps::kNothing,
                    "plan settings: keeps says what a recomputation keeps, but recompute is false");
  TORCH_CHECK_VALUE(context_order == PartOrder::kHeadTail || mesh.cp > 1,
                    "plan settings: context_order is contiguous, but no sequence is split: cp is 1");
  TORCH_CHECK_VALUE(!float8_gather || float8 == Float8Scaling::kTensor,
                    "plan settings: float8_gather is for products in fp8 with a scale a tensor, but float8 is ",
                    float8 ? "by rows" : "unset");
  TORCH_CHECK_VALUE(!float8_gather || strategy != Strategy::kNoShard,
                    "plan settings: float8_gather is true, but strategy no-shard gathers no parameter");
  TORCH_CHECK_VALUE(!float8_gather || mesh.tp == 1,
                    "plan settings: float8_gather is true, but no weight that tp splits is gathered in fp8: tp is ", mesh.tp);
  TORCH_CHECK_VALUE(chunks >= 0, "plan settings: chunks is ", chunks, ", but must not be negative");
  TORCH_CHECK_VALUE(resident_stages >= 0, "plan settings: resident_stages is ", resident_stages, ", but must not be negative");
  TORCH_CHECK_VALUE(resident_stages == 0 || mesh.pp > 1, "plan settings: resident_stages is ", resident_stages,
                    ", but there are no stages: pp is 1");
  const bool has_outer = row_of(strategy).outer.has_value();
  TORCH_CHECK_VALUE(has_outer == (mesh.replicate > 1 && strategy != Strategy::kNoShard), "plan settings: strategy ",
                    row_of(strategy).name, has_outer ? " needs" : " takes no", " replicas, but replicate is ", mesh.replicate);
  TORCH_CHECK_VALUE(strategy != Strategy::kNoShard || mesh.shard == 1,
                    "plan settings: without sharding the ranks are replicas, but shard is ", mesh.shard);
  const auto& names = plan_optimizers();
  TORCH_CHECK_VALUE(std::find(names.begin(), names.end(), optimizer) != names.end(), "plan settings: unknown optimizer \"",
                    optimizer, "\"; did you mean \"", internal::nearest_of(optimizer, names), "\"?");
  TORCH_CHECK_VALUE(max_grad_norm >= 0, "plan settings: max_grad_norm is ", max_grad_norm, ", but must not be negative");
}

} // namespace tessera
