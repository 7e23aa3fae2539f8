#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include <tessera/fsdp/options.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/mixed_precision/policy.h>
#include <tessera/optim/adafactor.h>
#include <tessera/optim/adamw_8bit.h>
#include <tessera/optim/fused.h>
#include <tessera/optim/lamb.h>
#include <tessera/optim/lion.h>
#include <tessera/optim/muon.h>
#include <tessera/optim/one_bit.h>
#include <tessera/parallel/overlap.h>
#include <tessera/parallel/styles.h>
#include <tessera/training/lr_schedule.h>
#include <tessera/training/own_settings.h>
#include <tessera/training/train_arguments.h>
#include <tessera/training/trainer_options.h>

namespace tessera {

/// train = micro × accumulation × data-parallel ranks, in rows.
struct BatchConfig {
  int64_t train = 0, micro = 0, accumulation = 0;
};

/// docs/from_deepspeed.md has the dtype of each tensor under each name.
struct PrecisionConfig {
  std::string name = "fp32"; ///< "fp32", "bf16_mixed", "bf16_full", "deepspeed"
  /// What `set_dtype` makes of the parameters before they are sharded; unset: they stay as they are.
  std::optional<c10::ScalarType> parameters;
  MixedPrecisionPolicy policy;
};

/// What `muon_groups` takes.
struct MuonConfig {
  MuonOptions muon, adamw;
  std::vector<std::string> others; ///< matrices that AdamW steps
};

using OptimizerConfig =
    std::variant<std::monostate, torch::optim::AdamOptions, torch::optim::AdamWOptions, torch::optim::SGDOptions,
                 torch::optim::AdagradOptions, LambOptions, LionOptions, AdafactorOptions, AdamW8bitOptions, MuonConfig,
                 OneBitAdamOptions, OneBitLambOptions, ZeroOneAdamOptions>;

/// Whether it takes gradients that nothing has reduced: DeepSpeed's optimizers of one bit.
bool reduces_by_itself(const OptimizerConfig& optimizer);

/// Hugging Face's "linear" and "cosine".
struct LinearSchedule : WarmupOptions {};
struct CosineSchedule : WarmupOptions {};

using ScheduleConfig = std::variant<std::monostate, WarmupLROptions, WarmupDecayOptions, WarmupCosineRatioOptions, LinearSchedule,
                                    CosineSchedule, WSDOptions>;

/// How a model lies on the ranks.
struct ShardingConfig {
  Strategy strategy = Strategy::kNoShard;
  std::vector<std::pair<std::string, int64_t>> mesh; ///< dims and their ranks, outer first: of pp, replicate, shard, cp, tp
  std::optional<ReshardAfterForward> reshard_after_forward;
  BufferLayout layout = BufferLayout::kRagged;
  InitialWeights initial_weights = InitialWeights::kCheck;
  OffloadPolicy offload;
  Communication communication;
  bool recompute = false;                 ///< the program is to recompute its blocks in backward
  std::optional<ParallelPlan> plan;       ///< of tp; unset: `plan_for`
  bool sequence_parallel = false;         ///< `PlanOptions::sequence`
  Overlap overlap = Overlap::kNever;      ///< of tp, with `sequence_parallel`
  std::string pipeline_schedule = "1f1b"; ///< of pp, as `pipeline_schedule_kind` names it
  int64_t pipeline_chunks = 0;            ///< stages a rank; 0: 2 where the schedule has several, otherwise 1
  int64_t resident_stages = 0;            ///< of pp: `PipelineOptions::resident_stages`
};

/// The settings of a training from a file: DeepSpeed's JSON as it is, with a block "tessera" for what DeepSpeed has no keys for.
///
/// The JSON may have comments (`//`, `#`, `/* */`) and a comma before a closing bracket. Keys have DeepSpeed's meaning and
/// defaults; docs/from_deepspeed.md says for each what it does here. Values "auto" are filled by the arguments. Errors, which
/// name the file and the key: a key that is unknown, with the nearest one, or is there twice; a value of another type; an
/// option of another stage; a meaning that is not here; an "auto" that nothing fills; values that differ from the arguments; a
/// batch that does not divide, with numbers that do. Local: each rank reads the same.
struct TrainConfig {
  using Arguments = TrainArguments;

  /// `source` names the text in errors.
  static TrainConfig parse(const std::string& text, const TrainArguments& arguments = {}, const std::string& source = "config");
  /// An error for a file that cannot be read.
  static TrainConfig read(const std::string& path, const TrainArguments& arguments = {});

  BatchConfig batch;
  PrecisionConfig precision;
  OptimizerConfig optimizer;
  ScheduleConfig schedule;
  ShardingConfig sharding;
  TrainerOptions trainer;         ///< without meshes, which `trainer_options` adds
  std::vector<std::string> notes; ///< to be said once: keys of the file without effect, and why; what is easily taken otherwise

  /// All ranks in the dims of `sharding`. Every rank calls it. An error where the job has another number of ranks.
  DeviceMesh make_mesh(c10::DeviceType device) const;
  /// What `fully_shard` takes of that mesh: the dims whose ranks hold a whole model together, flattened as the strategy needs
  /// them.
  DeviceMesh shard_mesh(const DeviceMesh& mesh) const;
  /// The ranks of that mesh that have different rows.
  DeviceMesh data_mesh(const DeviceMesh& mesh) const;

  FullyShardOptions shard_options() const;
  /// Its `data_mesh` has the ranks that share a sequence (cp) too: each computes the loss of its part.
  TrainerOptions trainer_options(const DeviceMesh& mesh) const;
  /// Brings the parameters of `model` to the dtype of `precision`, before it is sharded. Buffers stay as they are.
  void set_dtype(torch::nn::Module& model) const;
  /// The plan of tensor parallelism for `model`: the file's, or `plan_for`.
  ParallelPlan parallel_plan(torch::nn::Module& model) const;

  /// The optimizer of the file for what is to be trained of `model`. An error where the file has none.
  std::unique_ptr<torch::optim::Optimizer> make_optimizer(const torch::nn::Module& model) const;
  /// For parameters without names. An error for Muon, which needs a model to know the matrices.
  std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::vector<at::Tensor>& parameters) const;
  bool has_optimizer() const { return optimizer.index() != 0; }
  /// Null where the file has no schedule.
  std::unique_ptr<torch::optim::LRScheduler> make_schedule(torch::optim::Optimizer& optimizer) const;
  bool has_schedule() const { return schedule.index() != 0; }
  /// Errors for a program with an optimizer, or a schedule, of its own, where the file has one too.
  void check_no_optimizer() const;
  void check_no_schedule() const;

  /// A block of the program's own keys: "model", "data". Empty where the file has none. One that the program does not ask for is
  /// not looked at.
  OwnSettings own(const std::string& name) const;
  /// Reads them into a struct by its function `read(OwnSettings&)`. An error for a key that this does not read.
  template <typename Options>
  Options own(const std::string& name) const {
    Options options;
    auto settings = own(name);
    options.read(settings);
    settings.check_all_read();
    return options;
  }

  /// JSON of all that the file set and the arguments filled, which `parse` reads again: to be saved with each checkpoint.
  const std::string& resolved() const { return resolved_; }

  /// A key, its value, and where that is from ("file", "default", an argument).
  struct Line {
    std::string key, value, origin;
    std::string_view here; ///< what the key does here
  };
  std::vector<Line> lines() const { return lines_; }

 private:
  std::string source_, resolved_;
  std::map<std::string, std::string> own_; ///< JSON by name
  std::vector<Line> lines_;
};

/// How the settings of a run that is resumed differ from those here, one key a line: "optimizer.params.lr: saved 0.1, here 0.2".
/// Keys without effect are left out. `saved` is what `resolved` gave.
std::vector<std::string> differences(const std::string& saved, const TrainConfig& here);

/// Tensors of a parameter's shape that the optimizer of the config keeps, for `ExplainOptions`; 0 without an optimizer.
int64_t optimizer_tensors(const OptimizerConfig& optimizer);

/// DeepSpeed's JSON from the YAML of `accelerate config`, whose content `yaml_as_json` is: `TrainConfig::parse` reads it.
/// `source` names it in errors: an unknown key, with the nearest, and what is not here. `notes` gets what has no effect, and why.
std::string config_from_accelerate(const std::string& yaml_as_json, const std::string& source, std::vector<std::string>& notes);

} // namespace tessera
