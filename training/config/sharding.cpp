// The ranks, and what each of them keeps.
#include <absl/strings/str_split.h>
#include <c10/util/Exception.h>
#include <c10/util/safe_numerics.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <variant>

#include <tessera/training/config/sections.h>

namespace tessera::internal {

namespace {

constexpr auto kDims = std::to_array<const char*>({"pp", "replicate", "shard", "cp", "tp"});

using Mesh = std::vector<std::pair<std::string, int64_t>>;

Strategy strategy_of_stage(int64_t stage) {
  constexpr auto kOfStage =
      std::to_array<Strategy>({Strategy::kNoShard, Strategy::kZero1, Strategy::kZero2, Strategy::kFullShard});
  return kOfStage[static_cast<size_t>(stage)];
}

Strategy named_strategy(const ConfigValues& values) {
  const auto stage = values.stage();
  const auto name = values.optional_text("tessera.strategy");
  if (!name) return strategy_of_stage(stage);
  const auto row = std::find_if(kStrategies.begin(), kStrategies.end(), [&](const auto& each) { return each.name == *name; });
  TORCH_CHECK_VALUE(stage_of(row->strategy) == stage, values.where("tessera.strategy"), " is ", *name, ", which is stage ",
                    stage_of(row->strategy), ", but zero_optimization.stage is ", stage);
  return row->strategy;
}

/// Ranks of tp in DeepSpeed's block, 1 without it.
int64_t tensor_parallel_ranks(const ConfigValues& values) {
  const auto ranks = std::max(values.integer("tensor_parallel.autotp_size"), values.integer("tensor_parallel.tp_size"));
  TORCH_CHECK_VALUE(ranks <= 1 || !values.has("tessera.mesh.tp"), values.where("tensor_parallel.autotp_size"),
                    " and tessera.mesh.tp are both given");
  return std::max<int64_t>(ranks, 1);
}

struct Sizes {
  Mesh dims;
  int64_t known = 1;      ///< product of those that are given
  size_t open = SIZE_MAX; ///< the dim that takes the rest
};

Sizes given_sizes(const ConfigValues& values, Strategy strategy) {
  Sizes sizes;
  const bool is_split = strategy != Strategy::kNoShard;
  for (const std::string dim : kDims) {
    const auto key = "tessera.mesh." + dim;
    auto size = values.integer(key);
    if (dim == "tp" && !values.has(key)) size = tensor_parallel_ranks(values);
    if (dim == "shard" && !values.has(key) && !is_split) size = 1; // replicas take the rest
    if (dim == "replicate" && !values.has(key) && !is_split && !values.has("tessera.mesh.shard")) size = -1;
    TORCH_CHECK_VALUE(size == -1 || size >= 1, values.where(key), " is ", size,
                      ", but must be positive, or -1 for the ranks that remain");
    TORCH_CHECK_VALUE(size != -1 || sizes.open == SIZE_MAX, values.source(), ": two dims of tessera.mesh are -1, ",
                      sizes.open == SIZE_MAX ? "" : sizes.dims[sizes.open].first, " and ", dim);
    if (size == -1) sizes.open = sizes.dims.size();
    TORCH_CHECK_VALUE(!c10::mul_overflows(sizes.known, std::abs(size), &sizes.known), values.where("tessera.mesh"),
                      " has more ranks than can be counted: ", dim, " is ", size);
    sizes.dims.emplace_back(dim, size);
  }
  return sizes;
}

std::string to_text(const Mesh& mesh) {
  std::string text;
  for (const auto& [dim, size] : mesh) {
    if (size > 1) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", dim, size);
  }
  return text.empty() ? "1" : text;
}

/// Of all ranks; dims of one rank are left out.
Mesh mesh_of(const ConfigValues& values, Strategy strategy, int64_t ranks) {
  auto [dims, known, open] = given_sizes(values, strategy);
  TORCH_CHECK_VALUE(ranks % known == 0 && (open != SIZE_MAX || known == ranks), values.where("tessera.mesh"), " (", to_text(dims),
                    ") does not make the ", ranks, " ranks of the job");
  if (open != SIZE_MAX) dims[open].second = ranks / known;
  const auto mics = values.integer("zero_optimization.mics_shard_size");
  auto &replicate = dims[1].second, &shard = dims[2].second;
  if (mics > 0 && mics != shard) {
    TORCH_CHECK_VALUE(replicate == 1 && shard % mics == 0, values.where("zero_optimization.mics_shard_size"), " is ", mics,
                      ", which does not divide the ", shard, " ranks that shard");
    replicate = shard / mics;
    shard = mics;
  }
  const bool has_rows = replicate > 1 || shard > 1; // otherwise one dim of one rank has them
  const std::string rows = strategy == Strategy::kNoShard ? "replicate" : "shard";
  Mesh mesh;
  std::copy_if(dims.begin(), dims.end(), std::back_inserter(mesh),
               [&](const auto& dim) { return dim.second > 1 || (!has_rows && dim.first == rows); });
  return mesh;
}

int64_t size_of(const Mesh& mesh, const std::string& dim) {
  const auto found = std::find_if(mesh.begin(), mesh.end(), [&](const auto& each) { return each.first == dim; });
  return found == mesh.end() ? 1 : found->second;
}

/// What is sent in fewer bits, by either name.
Communication communication_in(const ConfigValues& values) {
  constexpr auto* kKey = "tessera.communication";
  const auto own = values.optional_text(kKey);
  const bool weights = values.boolean("zero_optimization.zero_quantized_weights"),
             gradients = values.boolean("zero_optimization.zero_quantized_gradients");
  TORCH_CHECK_VALUE(!own || !(weights || gradients), values.where(kKey), " and zero_quantized_",
                    weights ? "weights" : "gradients", " are both given");
  if (own) {
    try {
      return communication_of(*own);
    } catch (const c10::Error& error) {
      TORCH_CHECK_VALUE(false, values.where(kKey), ": ", error.what_without_backtrace());
    }
  }
  Communication communication;
  if (weights) communication.gather = QuantizedGather();
  if (gradients) communication.reduction = quantized_reduction({.codec = {.wire = Wire::kInt4}});
  return communication;
}

/// The strategy that the mesh makes of it, as `fully_shard` does.
Strategy strategy_on(const ConfigValues& values, Strategy strategy, const Mesh& mesh) {
  const bool needs_two = row_of(strategy).outer.has_value();
  const bool has_two = size_of(mesh, "replicate") > 1 && size_of(mesh, "shard") * size_of(mesh, "cp") > 1;
  TORCH_CHECK_VALUE(!needs_two || has_two, values.where("tessera.strategy"), " is ", row_of(strategy).name,
                    ", which needs dims replicate and shard in tessera.mesh");
  return strategy == Strategy::kFullShard && has_two ? Strategy::kHybridShard : strategy;
}

std::optional<ReshardAfterForward> reshard_of(const ConfigValues& values, const Mesh& mesh) {
  const auto ranks = size_of(mesh, "shard") * size_of(mesh, "cp");
  const auto part = [&](const char* key, int64_t number) {
    TORCH_CHECK_VALUE(number >= 1 && ranks % number == 0, values.where(key), " is ", number, ", which does not divide the ",
                      ranks, " ranks that shard");
    return number == ranks ? ReshardAfterForward(true) : ReshardAfterForward(number);
  };
  const auto hpz = values.integer("zero_optimization.zero_hpz_partition_size");
  constexpr auto* kKey = "tessera.reshard_after_forward";
  const auto own = values.json(kKey);
  TORCH_CHECK_VALUE(hpz <= 1 || own.is_null(), values.where(kKey), " and zero_hpz_partition_size are both given");
  if (hpz > 1) return part("zero_optimization.zero_hpz_partition_size", hpz);
  if (own.is_null()) return std::nullopt;
  if (own.is_boolean()) return ReshardAfterForward(own.get<bool>());
  TORCH_CHECK_VALUE(own.is_number_integer(), values.where(kKey), " is ", internal::to_text(own),
                    ", but must be true, false or a number of ranks");
  return part(kKey, own.get<int64_t>());
}

/// The place that one of DeepSpeed's two blocks names: "none", "cpu" or "nvme".
std::string device_of(const ConfigValues& values, const std::string& block, const char* old_name) {
  const auto device = values.text(block + ".device");
  return device == "none" && values.boolean(old_name) ? "cpu" : device;
}

OffloadPolicy offload_of(ConfigValues& values) {
  const std::string states = "zero_optimization.offload_optimizer", parameters = "zero_optimization.offload_param";
  const auto of_states = device_of(values, states, "zero_optimization.cpu_offload"),
             of_parameters = device_of(values, parameters, "zero_optimization.cpu_offload_param");
  if (of_states == "none" && of_parameters == "none") return {};
  TORCH_CHECK_VALUE(of_states == "none" || of_parameters == "none" || of_states == of_parameters,
                    values.where(parameters + ".device"), " is ", of_parameters, " and that of offload_optimizer is ", of_states,
                    ": here they lie in one place");
  const auto& block = of_states == "none" ? parameters : states;
  if (of_states == "none" || of_parameters == "none")
    values.notes().push_back(block + " is for shards, reduced gradients and optimizer states alike: here they lie in one place");
  const bool pinned = values.boolean(block + ".pin_memory");
  if ((of_states == "none" ? of_parameters : of_states) == "cpu") return offload_to_host(pinned);
  const auto folder = values.optional_text(block + ".nvme_path");
  TORCH_CHECK_VALUE(folder, values.where(block + ".nvme_path"), " is not given, the folder that nvme needs");
  return offload_to_files(*folder, pinned);
}

/// "colwise packed 3".
ParallelStyle style_of(const std::string& text, const std::string& where) {
  const std::vector<std::string> words = absl::StrSplit(text, ' ', absl::SkipEmpty());
  const auto& name = words.empty() ? text : words[0];
  if (words.size() == 3 && name == "colwise" && words[1] == "packed")
    return Colwise{.packed = std::max<int64_t>(1, std::atoll(words[2].c_str()))};
  if (words.size() == 1 && name == "colwise") return Colwise{};
  if (words.size() == 1 && name == "rowwise") return Rowwise{};
  if (words.size() == 1 && name == "vocab") return VocabParallel{};
  if (words.size() == 1 && name == "sequence") return Sequence{};
  if (words.size() == 1 && name == "replicated") return Replicated{};
  TORCH_CHECK_VALUE(false, where, " is \"", text,
                    "\", but must be colwise, colwise packed N, rowwise, vocab, sequence or replicated",
                    nearest_name(name, {"colwise", "rowwise", "vocab", "sequence", "replicated"}));
}

std::optional<ParallelPlan> plan_of(const ConfigValues& values) {
  const auto block = values.json("tessera.plan");
  if (block.is_null()) return std::nullopt;
  const auto where = values.where("tessera.plan");
  TORCH_CHECK_VALUE(block.is_object(), where, " is ", internal::to_text(block), ", but must be a block of paths and styles");
  ParallelPlan plan;
  for (const auto& [path, style] : block.items()) {
    TORCH_CHECK_VALUE(style.is_string(), where, '.', path, " is ", internal::to_text(style), ", but must be the name of a style");
    plan.push_back({path, style_of(style.get<std::string>(), where + '.' + path)});
  }
  return plan;
}

/// `plan_for` makes the plan that sequence parallelism is an option of.
bool sequence_parallel_of(const ConfigValues& values, const ShardingConfig& sharding) {
  const bool is_asked = values.boolean("tessera.sequence_parallel");
  TORCH_CHECK_VALUE(!is_asked || !sharding.plan, values.where("tessera.sequence_parallel"), " is true beside ",
                    "tessera.plan, which says by itself what is split: leave the plan out to split sequences between all layers, "
                    "or this one and "
                    "give the plan's norms the style sequence");
  return is_asked;
}

/// Layers overlap with collectives of parts of sequences.
Overlap overlap_in(const ConfigValues& values, const ShardingConfig& sharding) {
  const auto overlap = overlap_of(values.text("tessera.overlap"));
  const auto is_sequence = [](const PlanLine& line) { return std::holds_alternative<Sequence>(line.style); };
  const bool splits =
      sharding.plan ? std::any_of(sharding.plan->begin(), sharding.plan->end(), is_sequence) : sharding.sequence_parallel;
  TORCH_CHECK_VALUE(overlap == Overlap::kNever || splits, values.where("tessera.overlap"), " is ", to_string(overlap),
                    ", which needs split sequences, but ",
                    sharding.plan ? "no style of tessera.plan is sequence" : "tessera.sequence_parallel is false");
  return overlap;
}

BufferLayout layout_of(const ConfigValues& values) {
  return values.text("tessera.layout") == "ragged" ? BufferLayout::kRagged : BufferLayout::kPerParameter;
}

InitialWeights initial_weights_of(const ConfigValues& values) {
  const auto name = values.text("tessera.initial_weights");
  return name == "check" ? InitialWeights::kCheck : name == "broadcast" ? InitialWeights::kBroadcast : InitialWeights::kUnchecked;
}

int64_t resident_stages_of(const ConfigValues& values) {
  const auto stages = values.integer("tessera.pipeline.resident_stages");
  TORCH_CHECK_VALUE(stages >= 0, values.where("tessera.pipeline.resident_stages"), " is ", stages, ", but must not be negative");
  return stages;
}

} // namespace

ShardingConfig sharding_of(ConfigValues& values, int64_t ranks) {
  TORCH_CHECK_VALUE(ranks >= 1, values.source(), ": a job of ", ranks, " ranks");
  ShardingConfig sharding;
  const auto named = named_strategy(values);
  sharding.mesh = mesh_of(values, named, ranks);
  sharding.strategy = strategy_on(values, named, sharding.mesh);
  sharding.reshard_after_forward = reshard_of(values, sharding.mesh);
  sharding.layout = layout_of(values);
  sharding.initial_weights = initial_weights_of(values);
  sharding.offload = offload_of(values);
  sharding.communication = communication_in(values);
  sharding.recompute = values.has("activation_checkpointing") || values.boolean("tessera.recompute");
  sharding.plan = plan_of(values);
  sharding.sequence_parallel = sequence_parallel_of(values, sharding);
  sharding.overlap = overlap_in(values, sharding);
  sharding.pipeline_schedule = values.text("tessera.pipeline.schedule");
  sharding.pipeline_chunks = values.integer("tessera.pipeline.chunks");
  sharding.resident_stages = resident_stages_of(values);
  return sharding;
}

int64_t data_ranks(const ShardingConfig& sharding) {
  return size_of(sharding.mesh, "replicate") * size_of(sharding.mesh, "shard");
}

} // namespace tessera::internal
