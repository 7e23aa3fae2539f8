#pragma once

#include <tessera/parallel/context_attention.h>
#include <tessera/parallel/overlap.h>
#include <tessera/parallel/pipeline_schedule.h>

#include <string>

#include "common/job_options.h"
#include "gpt/model.h"

namespace gpt {

using examples::parse_mesh;
using examples::Precision;
using examples::Strategy;
using examples::to_string;

/// What the command line says.
struct Options : examples::JobOptions {
  std::string data;
  ModelConfig model;

  int64_t steps = 0;
  int64_t batch = 0;               ///< rows a step of a rank, or of the ranks that split its sequences; 0: from `global_batch`
  int64_t global_batch = 0;        ///< rows a step over all ranks; 0: from `batch`
  std::string optimizer = "adamw"; ///< a name that `make_optimizer` takes
  bool step_in_backward = false;   ///< each group as soon as it is reduced
  double learning_rate = 0;
  int64_t warmup = 0; ///< steps of linear warm-up; a cosine down to a tenth follows
  double clip = 0;    ///< the largest global gradient norm; 0: no clipping
  double weight_decay = 0;
  bool recompute = false;                              ///< of the blocks, in backward
  bool sequence_parallel = false;                      ///< activations between the layers are split over their time
  tessera::Overlap overlap = tessera::Overlap::kNever; ///< of layers and collectives under `sequence_parallel`
  tessera::PipelineScheduleKind schedule = tessera::PipelineScheduleKind::k1F1B; ///< with a dim pp
  int64_t micro_batches = 0;                                                     ///< of a step of a pipeline
  uint64_t seed = 0;
  double max_seconds = 0; ///< stop training after so long; 0: never

  std::string log, samples; ///< files; empty: none
  int64_t validate_every = 0, validation_batches = 0;
  int64_t sample_bytes = 0;
  std::string prompt;
  std::string checkpoint; ///< folder of the checkpoints; empty: none are written
  int64_t save_every = 0; ///< 0: only after the last step
  int keep_last = 0;      ///< older checkpoints are removed; 0: all are kept
  bool resume = false;
  std::string trace;        ///< folder for a Chrome trace of a step from each rank; empty: none
  std::string dump_initial; ///< folder for the initial weights and all batches; empty: none

  int context_ranks = 1; ///< over which each sequence is split
  tessera::ContextParallel context = tessera::ContextParallel::kAllGather;

  /// The ranks over which experts are split: those of ep and of tp.
  int64_t expert_ranks() const { return expert_parallel.value_or(1) * tensor_parallel.value_or(1); }
  /// The groups of ranks that have rows of their own, among `world` ranks. The ranks of one split sequences or layers.
  int64_t data_ranks(int world) const { return examples::data_ranks(*this, world) / context_ranks; }
  /// The rows of such a group.
  int64_t rows_a_rank(int world) const { return batch > 0 ? batch : global_batch / data_ranks(world); }
};

/// Whether the optimizer of this name takes gradients that nothing has reduced, of a model that every rank has whole.
bool reduces_by_itself(const std::string& optimizer);

/// Reads the command line; `-` and `_` in a flag's name are the same. Throws c10::Error that names the flag for a value out of
/// its range or flags that contradict each other; a flag that does not exist ends the program (Abseil does that).
Options parse_options(int argc, char** argv);

/// Throws when `options` do not fit a job of `world` ranks: a mesh of another size, a global batch that does not divide.
void check_world(const Options& options, int world);

} // namespace gpt
