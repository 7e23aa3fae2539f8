#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/fsdp/options.h>
#include <tessera/mesh/part_order.h>
#include <tessera/nn/float8_scaling.h>
#include <tessera/offload/offload_policy.h>
#include <tessera/parallel/context_attention.h>
#include <tessera/parallel/pipeline_schedule.h>

namespace tessera {

/// The names that `tessera.precision` of a trainer's config has.
enum class PlanPrecision : uint8_t {
  kFp32,      ///< "fp32"
  kBf16Mixed, ///< "bf16_mixed": parameters in fp32, forward and backward in bf16, gradients reduced in fp32
  kDeepSpeed, ///< "deepspeed": the same, but gradients are reduced in bf16
  kBf16Full,  ///< "bf16_full": everything in bf16, the optimizer's state too
};

/// What a recomputed block keeps beside its inputs.
enum class RecomputeKeeps : uint8_t {
  kNothing,
  /// The results of attention, and of every second matrix product from the first on: torchtitan's selective activation
  /// checkpointing of operators.
  kSecondProducts,
};

/// The ranks of each dim of a job's mesh, outer first.
struct PlanMesh {
  int64_t pp = 1;
  int64_t replicate = 1; ///< replicas of what is sharded: above 1 with the strategies hybrid and hierarchical
  int64_t shard = 1;
  int64_t cp = 1;
  int64_t tp = 1;
  int64_t ep = 1; ///< among which experts are split, of the ranks of the dims but pp; no dim of its own

  int64_t ranks() const { return pp * replicate * shard * cp * tp; }
  int64_t data_ranks() const { return replicate * shard; } ///< that have rows of their own
  friend bool operator==(const PlanMesh&, const PlanMesh&) = default;
};

/// One way to train a model.
struct PlanSettings {
  PlanMesh mesh;
  Strategy strategy = Strategy::kFullShard;
  /// Unset: as `FullyShardOptions::reshard_after_forward`.
  std::optional<ReshardAfterForward> reshard_after_forward = std::nullopt;
  BufferLayout layout = BufferLayout::kRagged;
  PlanPrecision precision = PlanPrecision::kBf16Mixed;
  int64_t rows = 1;         ///< of a micro-batch of a rank
  int64_t accumulation = 1; ///< micro-batches of a step; of a pipeline those that pass through it
  bool recompute = false;
  RecomputeKeeps keeps = RecomputeKeeps::kNothing; ///< with recompute
  /// Linear layers multiply in fp8, but those that `PlannedModel::not_in_float8` names. Unset: none does.
  std::optional<Float8Scaling> float8 = std::nullopt;
  bool float8_gather = false; ///< with `Float8Scaling::kTensor`: these layers' weights are gathered in fp8 too (`float8_gather`)
  bool sequence_parallel = false; ///< with tp: activations between layers are split over their time
  ContextParallel context_scheme = ContextParallel::kAllGather;
  /// With cp the parts of a sequence lie so. Of contiguous ones the last rank has most of causal attention, and is predicted.
  PartOrder context_order = PartOrder::kHeadTail;
  OffloadPolicy::Memory offload = OffloadPolicy::Memory::kDevice;
  std::string optimizer = "AdamW"; ///< a name of `plan_optimizers`
  double max_grad_norm = 1.0;      ///< 0: no clipping
  PipelineScheduleKind schedule = PipelineScheduleKind::k1F1B;
  int64_t chunks = 0; ///< stages a rank of the pipeline; 0: 2 where the schedule needs them, otherwise 1
  /// The most stages of a rank that are gathered at once, as `PipelineOptions` has it. 0: all of them.
  int64_t resident_stages = 0;

  /// Rows of a step on all ranks.
  int64_t global_rows() const { return rows * accumulation * mesh.data_ranks(); }
  /// "full, shard 8 x tp 2, 4 rows x 2, bf16_mixed, recompute, AdamW"
  std::string to_string() const;
  /// Throws what cannot be: sizes below 1, a strategy that does not fit the mesh, an unknown optimizer (with the nearest).
  void check() const;
};

/// The optimizers that can be planned: "AdamW", "Adam", "SGD", "Momentum", "Lion", "Lamb", "Adafactor", "AdamW8bit", "Muon".
const std::vector<std::string>& plan_optimizers();

std::string_view to_string(PlanPrecision precision);
/// Throws with the names that there are for an unknown one.
PlanPrecision plan_precision(std::string_view name);

} // namespace tessera
