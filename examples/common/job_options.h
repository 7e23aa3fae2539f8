#pragma once

#include <c10/core/DeviceType.h>
#include <tessera/fsdp/options.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace examples {

using tessera::Strategy;
enum class Precision { kFp32, kBf16, kFp16 };

/// How a program runs over ranks: the flags that the examples share.
struct JobOptions {
  int ranks = 0;                          ///< local ranks to start; 0: the environment says what rank this process is
  std::vector<int64_t> mesh;              ///< of the data-parallel dims; empty: from the strategy and the number of ranks
  std::optional<int64_t> tensor_parallel; ///< ranks of the mesh's last dim, tp; unset: it has none
  /// Ranks of the dim before that, cp, over which sequences are split, and which are in the last dim of `mesh` as well: those
  /// hold parameters together. Unset: it has none.
  std::optional<int64_t> context_parallel;
  /// Ranks of the dim ep, between cp and tp, over which experts are split, and which are in the last dim of `mesh` as well.
  /// Unset: it has none.
  std::optional<int64_t> expert_parallel;
  std::optional<int64_t> pipeline; ///< ranks of the mesh's first dim, pp; unset: it has none
  c10::DeviceType device = c10::kCPU;
  int threads = 0; ///< a rank's threads; 0: OMP_NUM_THREADS, or the cores divided by the local ranks
  std::optional<Strategy> strategy = Strategy::kFullShard; ///< unset: one process, the model as it is
  tessera::BufferLayout layout = tessera::BufferLayout::kRagged;
  Precision precision = Precision::kFp32;
  Precision reduce_precision = Precision::kFp32;
  std::optional<bool> reshard_after_forward;
  tessera::Communication communication; ///< gathers and reductions in fewer bits
};

/// What the flags say, after `parse_command_line`. Throws c10::Error that names the flag for a value out of its range or flags
/// that contradict each other, and for dims `pp`, `cp`, `ep` and `tp` unless the program `splits_models`: over stages, their
/// sequences, experts and layers.
JobOptions job_options(bool splits_models = false);

/// How many ranks, of `world`, have parameters of the same layers.
inline int64_t data_ranks(const JobOptions& options, int world) {
  return world / (options.tensor_parallel.value_or(1) * options.pipeline.value_or(1));
}

/// The mesh's shape and the names of its dims, for a job of `world` ranks. Throws when the options do not fit so many.
struct MeshShape {
  std::vector<int64_t> shape;
  std::vector<std::string> names;
};
MeshShape mesh_shape(const JobOptions& options, int world);

/// Throws when the strategy and the mesh do not fit a job of `world` ranks.
void check_job(const JobOptions& options, int world);

/// "2x2" → {2, 2}.
std::vector<int64_t> parse_mesh(const std::string& text);

const char* to_string(const std::optional<Strategy>& strategy);
const char* to_string(Precision precision);
const char* to_string(tessera::BufferLayout layout);

} // namespace examples
