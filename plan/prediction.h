#pragma once

#include <cstdint>
#include <string>

#include <tessera/plan/machine.h>
#include <tessera/plan/planned_model.h>
#include <tessera/plan/settings.h>

namespace tessera {

/// Bytes of one rank by what they are for.
struct PlanMemory {
  int64_t parameters = 0; ///< this rank's parts, parts kept beside them, and what is not sharded
  int64_t buffers = 0;    ///< of the modules
  int64_t optimizer_state = 0;
  int64_t gradients = 0;      ///< as `grad()` holds them
  int64_t unsharded = 0;      ///< gathered parameters
  int64_t reduce_buffers = 0; ///< gradients before their reduction
  int64_t cached = 0;         ///< freed blocks of the two above, which a CPU keeps
  int64_t activations = 0;    ///< what autograd keeps for backward, and the batch
  int64_t temporaries = 0;    ///< all else, which ends in its phase

  int64_t total() const;
};

/// What a training step of one setting takes, from steps of the real library on the meta device: the last of a few, in which all
/// state exists. Of a pipeline: of the stage whose rank needs most memory.
struct Prediction {
  PlanSettings settings;
  std::string model;
  int64_t parameters = 0; ///< elements of the whole model

  PlanMemory memory;                                               ///< of the device, when it holds most
  std::string peak_phase;                                          ///< "forward", "backward" or "optimizer"
  int64_t forward_peak = 0, backward_peak = 0, optimizer_peak = 0; ///< bytes
  int64_t host_bytes = 0;                                          ///< that a rank keeps on its host, or in files
  int64_t peak() const { return memory.total(); }

  double seconds = 0;       ///< of a step
  double compute = 0;       ///< of them: a rank's own work
  double exposed = 0;       ///< ... in which it waits for collectives, or in a pipeline for other stages
  double communication = 0; ///< seconds of all collectives, those that run beside the compute too
  int64_t bytes_sent = 0;   ///< payload of the rank's collectives in a step
  int64_t collectives = 0;
  int64_t gathers = 0; ///< of them, all-gathers; of a pipeline, of the rank that has most
  double flops = 0;    ///< of a rank's matrix products in a step, recomputation included

  int64_t global_rows() const { return settings.global_rows(); }
  double rows_per_second() const { return static_cast<double>(global_rows()) / seconds; }

  /// A table for people.
  std::string to_string() const;
  /// An object with the names of the fields above, "format": "tessera prediction" and "version": 1.
  std::string to_json() const;
};

/// Predicts a step of `model` on `machine` under `settings`, whose mesh has the machine's ranks. Builds the model on the meta
/// device, as one rank of a simulated group, shards it with this library and trains it for a few steps. Local: a single rank may
/// call it, with or without a process group, which it leaves alone. Errors: settings that do not fit the model or the machine
/// (`PlanSettings::check`); an operator without a kernel for the meta device, by its name.
Prediction predict(const PlannedModel& model, const Machine& machine, const PlanSettings& settings);

} // namespace tessera
