#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include <tessera/mesh/device_mesh.h>
#include <tessera/training/grad_scaler.h>
#include <tessera/training/training_log.h>

namespace tessera {

/// How often something happens: every so many steps, and whenever so much time has passed. Both 0: never.
struct Every {
  int64_t steps = 0;
  std::chrono::milliseconds time{0};
};

/// Says when a training ends: the first limit that is reached ends it. 0: no such limit. Times and steps of earlier runs of a
/// resumed training count, except `run_time`.
struct StopAfter {
  int64_t steps = 0;
  int64_t epochs = 0;
  std::chrono::milliseconds run_time{0}; ///< of this run: a time limit
};

/// Whether a smaller or a larger value of a metric is better.
enum class Better { kSmaller, kLarger };

/// What a resume does where the seed, or the rows of a step, are not those of the checkpoint.
enum class OtherSettings {
  kError, ///< the run would go on with another order of data, or other steps: an error on every rank
  kAccept ///< the differences are told to `on_resume`, and the run goes on with the settings here. What reductions in fewer bits
          ///< keep (`communication_state`) begins with zeros, also on another number of ranks
};

/// What a run does first.
enum class Resume {
  kIfThere, ///< goes on from the newest checkpoint in the folder, where there is one
  kNever    ///< begins; a folder that holds a checkpoint is an error
};

struct SaveOptions {
  std::string folder; ///< checkpoints are folders `step-000100` in it; empty: nothing is saved, nothing is resumed
  Every every;        ///< besides these, the training saves where it ends
  int64_t keep = 0;   ///< the newest that stay, at least 2; 0: all. The best one is not among them
  /// The evaluation whose best checkpoint stays in `<folder>/best`, as "valid" or, for another number than its loss,
  /// "valid.accuracy"; empty: none.
  std::string best;
  Better better = Better::kSmaller;
  Resume resume = Resume::kIfThere;
  OtherSettings other_settings = OtherSettings::kError;
};

/// The steps [first_step, first_step + steps) of this process are recorded, from 0: each rank writes FOLDER/rank-<rank>.json for
/// chrome://tracing and ui.perfetto.dev, with operators, modules and collectives. The first steps are slower than others.
struct ProfileOptions {
  std::string folder; ///< empty: nothing is recorded
  int64_t first_step = 2;
  int64_t steps = 1;
};

/// What `StepResult::flops_utilization` is computed from. 0: it is not known.
struct FlopsOptions {
  double a_row = 0;          ///< floating-point operations of forward and backward of one row, on all ranks together
  double peak_of_a_rank = 0; ///< operations a second that a rank's device could do
};

struct EarlyStop {
  std::string metric;    ///< as SaveOptions::best
  int64_t patience = 1;  ///< evaluations in a row without improvement that end the training
  double min_change = 0; ///< an improvement is larger than this
  Better better = Better::kSmaller;
};

/// What happens at a step whose loss or gradients are not finite on some rank. With a GradScaler, gradients that overflowed are a
/// step that it leaves out; a loss that is not finite, without the scale, is an error when it is the third in a row.
enum class NonFinite {
  kError, ///< an error on every rank that names the first module with NaN, where it can be found
  kSkip   ///< the step is left out, as a GradScaler does; the third in a row is the error
};

struct TrainerOptions {
  /// All ranks of the training. Undefined: all ranks of the job.
  DeviceMesh mesh;
  /// The ranks whose losses add up, which are those over which gradients are averaged: the mesh without dims that split layers
  /// (tp, pp). Ranks that share a sequence (cp) are among them: each has the loss and the count of its part. Undefined: `mesh`.
  DeviceMesh data_mesh;
  int64_t micro_batches = 1; ///< of a step, on each rank
  /// The largest norm of all gradients together, over all ranks. 0: gradients are not clipped. Their norm is known in any case.
  double max_grad_norm = 0;
  /// Its mesh, where it is unset, becomes `mesh`.
  GradScalerOptions scaler{.enabled = false};
  NonFinite non_finite = NonFinite::kError;
  uint64_t seed = 42; ///< of what modules draw, with the step and the rank
  StopAfter stop_after;
  SaveOptions save;
  Every evaluate; ///< besides these, the training evaluates where it has come to its end
  LogOptions log;
  std::optional<EarlyStop> early_stop;
  ProfileOptions profile;
  FlopsOptions flops;
  /// The program's settings as text, for example JSON. It is saved with each checkpoint, and `on_resume` is told what differs.
  std::string config;
};

} // namespace tessera
