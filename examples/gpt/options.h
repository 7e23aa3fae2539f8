#pragma once

#include <tessera/fsdp/options.h>

#include <optional>
#include <string>
#include <vector>

#include "gpt/model.h"

namespace gpt {

enum class Strategy {
  kNone,    ///< one process, the model as it is: what the others are compared with
  kFull,    ///< parameters, gradients and optimizer state sharded over all ranks
  kHybrid,  ///< sharded over the mesh's second dim, replicated over its first
  kNoShard, ///< whole parameters on every rank, gradients averaged
};
enum class Precision { kFp32, kBf16 };

/// What the command line says.
struct Options {
  std::string data;
  ModelConfig model;

  int64_t steps = 0;
  int64_t batch = 0;        ///< rows a rank and step; 0: from `global_batch`
  int64_t global_batch = 0; ///< rows a step over all ranks; 0: from `batch`
  double learning_rate = 0;
  int64_t warmup = 0; ///< steps of linear warm-up; a cosine down to a tenth follows
  double clip = 0;    ///< the largest global gradient norm; 0: no clipping
  double weight_decay = 0;
  uint64_t seed = 0;
  double max_seconds = 0; ///< stop training after so long; 0: never

  int ranks = 0;             ///< local ranks to start; 0: the environment says what rank this process is
  std::vector<int64_t> mesh; ///< empty: from the strategy and the number of ranks
  torch::DeviceType device = torch::kCPU;
  int threads = 0; ///< a rank's threads; 0: OMP_NUM_THREADS, or the cores divided by the local ranks
  Strategy strategy = Strategy::kFull;
  tessera::BufferLayout layout = tessera::BufferLayout::kRagged;
  Precision precision = Precision::kFp32;
  Precision reduce_precision = Precision::kFp32;
  std::optional<bool> reshard_after_forward;

  std::string log, samples; ///< files; empty: none
  int64_t validate_every = 0, validation_batches = 0;
  int64_t sample_bytes = 0;
  std::string prompt;
  std::string checkpoint; ///< folder of the checkpoints; empty: none are written
  int64_t save_every = 0; ///< 0: only after the last step
  int keep_last = 0;      ///< older checkpoints are removed; 0: all are kept
  bool resume = false;
  std::string dump_initial; ///< folder for the initial weights and all batches; empty: none

  /// The rows of one rank among `world` ranks.
  int64_t rows_a_rank(int world) const { return batch > 0 ? batch : global_batch / world; }
};

/// Reads the command line; `-` and `_` in a flag's name are the same. Throws c10::Error that names the flag for a value out of
/// its range or flags that contradict each other; a flag that does not exist ends the program (Abseil does that).
Options parse_options(int argc, char** argv);

/// Throws when `options` do not fit a job of `world` ranks: a mesh of another size, a global batch that does not divide.
void check_world(const Options& options, int world);

/// The mesh's shape and the names of its dims, for a job of `world` ranks. Throws as `check_world`.
struct MeshShape {
  std::vector<int64_t> shape;
  std::vector<std::string> names;
};
MeshShape mesh_shape(const Options& options, int world);

/// "2x2" → {2, 2}.
std::vector<int64_t> parse_mesh(const std::string& text);

const char* to_string(Strategy strategy);
const char* to_string(Precision precision);
const char* to_string(tessera::BufferLayout layout);

} // namespace gpt
