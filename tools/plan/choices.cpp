#include "choices.h"

#include <absl/flags/flag.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>
#include <c10/util/Exception.h>
#include <tessera/fsdp/strategy.h>
#include <tessera/parallel/pipeline_schedule.h>

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

ABSL_FLAG(double, budget, 0, "GB (10^9 bytes) of a rank; 0: the machine's memory");
ABSL_FLAG(int64_t, global_rows, 0, "rows of a step on all ranks; 0: what is fastest");
ABSL_FLAG(int64_t, max_rows, 64, "the search: most rows of a micro-batch of a rank");
ABSL_FLAG(int64_t, rows, 1, "--predict: rows of a micro-batch of a rank");
ABSL_FLAG(int64_t, accumulation, 1, "--predict: micro-batches of a step");
ABSL_FLAG(std::string, mesh, "", "ranks of dims, such as shard=8,tp=2; of pp, replicate, shard, cp, tp, ep. Empty: all that fit");
ABSL_FLAG(std::string, strategy, "", "no-shard, zero-1, zero-2, full, hybrid, hierarchical; several with commas. Empty: all");
ABSL_FLAG(std::string, precision, "bf16_mixed", "fp32, bf16_mixed, deepspeed, bf16_full; several with commas");
ABSL_FLAG(std::string, optimizer, "AdamW",
          "AdamW, Adam, SGD, Momentum, Lion, Lamb, Adafactor, AdamW8bit, Muon; several with commas");
ABSL_FLAG(std::string, recompute, "both",
          "on, off, both, or selective: attention and every second product are kept; --predict: both is off");
ABSL_FLAG(std::string, float8, "off",
          "products of linear layers in fp8, a scale a tensor or a row: off, tensor, rows; several with commas");
ABSL_FLAG(std::string, float8_gather, "off",
          "with --float8 tensor: their weights are gathered in fp8 too: on, off, both; --predict: both is off");
ABSL_FLAG(std::string, offload, "device", "device, host, files; several with commas");
ABSL_FLAG(std::string, schedule, "1f1b", "schedules of a pipeline, as tessera-pipeline names them; several with commas");
ABSL_FLAG(std::string, resident_stages, "0",
          "of a pipeline: gathered stages of a rank at most; 0: all of them; several with commas");
ABSL_FLAG(std::string, layout, "ragged", "ragged, per_parameter; several with commas");
ABSL_FLAG(bool, sequence_parallel, false, "--predict: with tp, activations between layers are split over their time");
ABSL_FLAG(std::string, context_scheme, "all_gather", "--predict: all_gather, ring, ulysses");
ABSL_FLAG(std::string, context_order, "head-tail",
          "--predict: of split sequences, head-tail or contiguous, whose last rank has most to do");
ABSL_FLAG(int64_t, runners_up, 5, "the search: how many others are printed");
ABSL_FLAG(int64_t, max_steps, 100, "the search: settings that are stepped at most, and a quarter more for what limits cost");

namespace tools {

namespace {

template <typename Value>
Value value_of(const char* flag, const std::string& text, const std::vector<std::pair<std::string, Value>>& known) {
  std::vector<std::string> names;
  for (const auto& [name, value] : known) {
    if (name == text) return value;
    names.push_back(name);
  }
  TORCH_CHECK_VALUE(false, "--", flag, ": \"", text, "\" is unknown; known are ", absl::StrJoin(names, ", "));
}

/// A list of what is between commas.
template <typename Parse>
auto list_of(const std::string& text, const Parse& parse) {
  std::vector<decltype(parse(text))> list;
  for (const auto& each : absl::StrSplit(text, ',', absl::SkipWhitespace())) list.push_back(parse(std::string(each)));
  return list;
}

tessera::Strategy strategy_of(const std::string& text) {
  std::vector<std::pair<std::string, tessera::Strategy>> known;
  for (const auto& row : tessera::kStrategies) known.emplace_back(row.name, row.strategy);
  return value_of("strategy", text, known);
}

tessera::OffloadPolicy::Memory offload_of(const std::string& text) {
  using Memory = tessera::OffloadPolicy::Memory;
  return value_of<Memory>("offload", text, {{"device", Memory::kDevice}, {"host", Memory::kHost}, {"files", Memory::kFiles}});
}

tessera::BufferLayout layout_of(const std::string& text) {
  using tessera::BufferLayout;
  return value_of<BufferLayout>("layout", text,
                                {{"ragged", BufferLayout::kRagged}, {"per_parameter", BufferLayout::kPerParameter}});
}

tessera::ContextParallel scheme_of(const std::string& text) {
  using tessera::ContextParallel;
  return value_of<ContextParallel>(
      "context_scheme", text,
      {{"all_gather", ContextParallel::kAllGather}, {"ring", ContextParallel::kRing}, {"ulysses", ContextParallel::kUlysses}});
}

tessera::PartOrder order_of(const std::string& text) {
  using tessera::PartOrder;
  return value_of<PartOrder>("context_order", text,
                             {{"head-tail", PartOrder::kHeadTail}, {"contiguous", PartOrder::kContiguous}});
}

std::vector<bool> recompute_of(const std::string& text) {
  return value_of<std::vector<bool>>("recompute", text,
                                     {{"on", {true}}, {"off", {false}}, {"both", {false, true}}, {"selective", {true}}});
}

std::optional<tessera::Float8Scaling> float8_of(const std::string& text) {
  using tessera::Float8Scaling;
  return value_of<std::optional<Float8Scaling>>(
      "float8", text, {{"off", std::nullopt}, {"tensor", Float8Scaling::kTensor}, {"rows", Float8Scaling::kRows}});
}

std::vector<bool> float8_gather_of(const std::string& text) {
  return value_of<std::vector<bool>>("float8_gather", text, {{"on", {true}}, {"off", {false}}, {"both", {false, true}}});
}

int64_t resident_stages_of(const std::string& text) {
  int64_t stages = 0;
  TORCH_CHECK_VALUE(absl::SimpleAtoi(text, &stages) && stages >= 0, "--resident_stages: \"", text, "\" is no number of stages");
  return stages;
}

tessera::PlanMesh mesh_of_flag() {
  tessera::PlanMesh mesh;
  std::set<std::string> named;
  for (const auto part : absl::StrSplit(absl::GetFlag(FLAGS_mesh), ',', absl::SkipWhitespace())) {
    const std::pair<std::string, std::string> sides = absl::StrSplit(part, absl::MaxSplits('=', 1));
    auto* const dim = value_of<int64_t*>("mesh", sides.first,
                                         {{"pp", &mesh.pp},
                                          {"replicate", &mesh.replicate},
                                          {"shard", &mesh.shard},
                                          {"cp", &mesh.cp},
                                          {"tp", &mesh.tp},
                                          {"ep", &mesh.ep}});
    TORCH_CHECK_VALUE(named.insert(sides.first).second, "--mesh names ", sides.first, " twice");
    TORCH_CHECK_VALUE(absl::SimpleAtoi(sides.second, dim) && *dim > 0, "--mesh: ", part,
                      " is no dim with its ranks, such as tp=2");
  }
  return mesh;
}

/// Of the flags that --predict alone takes, with their defaults.
void check_not_predicting() {
  const auto check = [](bool is_default, const char* flag) {
    TORCH_CHECK_VALUE(is_default, "--", flag, " is for --predict: the search chooses by itself");
  };
  check(absl::GetFlag(FLAGS_rows) == 1, "rows");
  check(absl::GetFlag(FLAGS_accumulation) == 1, "accumulation");
  check(!absl::GetFlag(FLAGS_sequence_parallel), "sequence_parallel");
  check(absl::GetFlag(FLAGS_context_scheme) == "all_gather", "context_scheme");
  check(absl::GetFlag(FLAGS_context_order) == "head-tail", "context_order");
}

void check_ranks(const tessera::PlanMesh& mesh, int64_t ranks) {
  TORCH_CHECK_VALUE(mesh.ranks() == ranks, "--mesh has ", mesh.ranks(), " ranks, but the machine has ", ranks,
                    "; --ranks says another number");
}

tessera::SearchOptions options_of_flags() {
  tessera::SearchOptions options;
  options.budget = budget_of_flags();
  options.global_rows = absl::GetFlag(FLAGS_global_rows);
  options.max_rows = absl::GetFlag(FLAGS_max_rows);
  if (!absl::GetFlag(FLAGS_mesh).empty()) options.meshes = {mesh_of_flag()};
  options.strategies = list_of(absl::GetFlag(FLAGS_strategy), strategy_of);
  options.layouts = list_of(absl::GetFlag(FLAGS_layout), layout_of);
  options.precisions =
      list_of(absl::GetFlag(FLAGS_precision), [](const std::string& text) { return tessera::plan_precision(text); });
  options.optimizers = list_of(absl::GetFlag(FLAGS_optimizer), [](const std::string& text) { return text; });
  const auto recompute = absl::GetFlag(FLAGS_recompute);
  options.recompute = recompute_of(recompute);
  if (recompute == "selective") options.keeps = {tessera::RecomputeKeeps::kSecondProducts};
  options.float8 = list_of(absl::GetFlag(FLAGS_float8), float8_of);
  options.float8_gather = float8_gather_of(absl::GetFlag(FLAGS_float8_gather));
  options.offload = list_of(absl::GetFlag(FLAGS_offload), offload_of);
  options.schedules =
      list_of(absl::GetFlag(FLAGS_schedule), [](const std::string& text) { return tessera::pipeline_schedule_kind(text); });
  options.resident_stages = list_of(absl::GetFlag(FLAGS_resident_stages), resident_stages_of);
  options.runners_up = absl::GetFlag(FLAGS_runners_up);
  options.max_steps = absl::GetFlag(FLAGS_max_steps);
  return options;
}

} // namespace

int64_t budget_of_flags() {
  const auto budget = absl::GetFlag(FLAGS_budget);
  TORCH_CHECK_VALUE(budget >= 0 && budget < 1e9, "--budget: ", budget, " GB");
  return static_cast<int64_t>(budget * 1e9);
}

tessera::SearchOptions search_options(int64_t ranks) {
  check_not_predicting();
  auto options = options_of_flags();
  for (const auto& mesh : options.meshes) check_ranks(mesh, ranks);
  return options;
}

tessera::PlanSettings settings_of_flags(int64_t ranks) {
  const auto options = options_of_flags();
  const auto only = [](const char* flag, const auto& list) {
    TORCH_CHECK_VALUE(list.size() == 1, "--predict: --", flag, " names ", list.size(), ", but one is predicted");
    return list[0];
  };
  tessera::PlanSettings settings{.mesh = mesh_of_flag()};
  if (!options.strategies.empty()) settings.strategy = only("strategy", options.strategies);
  auto& mesh = settings.mesh;
  auto& others = settings.strategy == tessera::Strategy::kNoShard ? mesh.replicate : mesh.shard;
  if (others == 1) {
    TORCH_CHECK_VALUE(ranks % mesh.ranks() == 0, "--mesh: ", mesh.ranks(), " ranks do not divide ", ranks);
    others = ranks / mesh.ranks();
  }
  check_ranks(mesh, ranks);
  settings.layout = only("layout", options.layouts);
  settings.precision = only("precision", options.precisions);
  settings.optimizer = only("optimizer", options.optimizers);
  settings.offload = only("offload", options.offload);
  settings.schedule = only("schedule", options.schedules);
  settings.resident_stages = only("resident_stages", options.resident_stages);
  settings.rows = absl::GetFlag(FLAGS_rows);
  settings.accumulation = absl::GetFlag(FLAGS_accumulation);
  settings.recompute = options.recompute.front();
  settings.keeps = options.keeps.front();
  settings.float8 = only("float8", options.float8);
  settings.float8_gather = options.float8_gather.front();
  settings.sequence_parallel = absl::GetFlag(FLAGS_sequence_parallel);
  settings.context_order = order_of(absl::GetFlag(FLAGS_context_order));
  settings.context_scheme = scheme_of(absl::GetFlag(FLAGS_context_scheme));
  return settings;
}

} // namespace tools
