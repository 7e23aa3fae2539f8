#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <tessera/plan/prediction.h>

namespace tessera {

/// What `plan` chooses among. An empty list takes what fits the model and the machine.
struct SearchOptions {
  int64_t budget = 0;      ///< bytes of a rank; 0: the machine's memory
  int64_t global_rows = 0; ///< of a step on all ranks; 0: the search takes the rows a second for the goal, whatever their number
  int64_t max_rows = 64;   ///< of a micro-batch of a rank

  std::vector<PlanMesh> meshes = {};
  std::vector<Strategy> strategies = {};
  std::vector<BufferLayout> layouts = {BufferLayout::kRagged};
  std::vector<PlanPrecision> precisions = {PlanPrecision::kBf16Mixed};
  std::vector<std::string> optimizers = {"AdamW"};
  std::vector<bool> recompute = {false, true};
  std::vector<RecomputeKeeps> keeps = {RecomputeKeeps::kNothing}; ///< of those that recompute
  std::vector<std::optional<Float8Scaling>> float8 = {std::nullopt};
  std::vector<bool> float8_gather = {false}; ///< of those with a scale a tensor
  std::vector<OffloadPolicy::Memory> offload = {OffloadPolicy::Memory::kDevice};
  std::vector<PipelineScheduleKind> schedules = {PipelineScheduleKind::k1F1B};
  std::vector<int64_t> resident_stages = {0}; ///< of pipelines

  int64_t runners_up = 5;
  int64_t max_steps = 100; ///< settings that are stepped, and a quarter more for limits; the search says so where it ends here
  /// Told of each setting that is stepped, for a progress line.
  std::function<void(const Prediction&)> progress = nullptr;
};

/// What something costs, beside the best plan.
struct PlanLimit {
  std::string what;               ///< "no recomputation", "1.5 x the memory"
  std::optional<Prediction> plan; ///< the fastest then; nothing where nothing fits
  int64_t memory = 0;             ///< bytes of a rank that it takes
  double speed = 0;               ///< its rows a second over the best plan's
  bool is_complete = true;        ///< false: `max_steps` ended the search for it; there may be a faster one, or one at all
};

struct Plan {
  Machine machine;
  int64_t budget = 0;
  std::optional<Prediction> best; ///< the fastest that fits; nothing where nothing does
  std::vector<Prediction> runners_up;
  std::vector<PlanLimit> limits;
  /// The setting that needs least of all that were tried: it says what would fit where `best` is empty.
  std::optional<Prediction> smallest;
  int64_t considered = 0, stepped = 0; ///< settings, and those that were stepped rather than ruled out
  int64_t refused = 0;                 ///< of the stepped ones, those that ended in an error, mostly sizes that do not divide
  std::string first_refusal;           ///< the settings and the error of the first of them
  bool is_complete = true;             ///< false: `max_steps` ended the search for the best

  std::string to_string() const;
  /// "format": "tessera plan", "version": 1.
  std::string to_json() const;
  /// A trainer's config of `best`: JSON that `TrainConfig::read` and tessera-config take. An error where nothing fits.
  std::string to_config() const;
};

/// The config of one prediction.
std::string config_of(const Prediction& prediction);

/// Searches for the fastest setting of `model` on `machine` that fits. Local, as `predict`.
Plan plan(const PlannedModel& model, const Machine& machine, const SearchOptions& options = {});

} // namespace tessera
