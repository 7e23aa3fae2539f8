#pragma once

/// The harness of tessera-bench for a program's own models: time and memory of a step, of saves, of gathers and more, under each
/// strategy, layout, precision, optimizer and place of the state. Link the target `tessera::bench`.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

/// What one case measures, and how. The names are those of the flags and of a matrix's keys; docs/benchmarks.md has the values.
struct BenchSettings {
  std::string measure = "step"; ///< "step", "gather", "reduction", "redistribution", "optimizer", "state_dict", "save", "load",
                                ///< or "explain", which runs nothing on the ranks: what is predicted for a step
  std::string model;            ///< one of the registered names; empty: the first
  int64_t layers = 4;
  int64_t width = 64;
  int64_t batch = 4;     ///< rows a rank
  int64_t sequence = 64; ///< tokens a row, of the models that have any
  int ranks = 1;
  std::string mesh; ///< "2x2"; empty: from the strategy and the ranks
  std::string strategy = "full";
  std::string layout = "ragged";
  std::string optimizer = "adamw";
  std::string reshard = "auto";            ///< after forward: "auto", "true", "false", or a number of ranks
  std::string precision = "fp32";          ///< of forward and backward, and of reductions
  std::string transport = "shared_memory"; ///< or "gloo"
  std::string offload = "none";            ///< "none", "host" or "files"
  bool recompute = false;                  ///< for the model to do: it calls `tessera::recompute` where this is set
  std::string quantize;                    ///< what `communication_of` takes, with spaces: "gather=int8 reduction=int4"
  std::string transition = "R to S(0)";    ///< of the measure redistribution
  int64_t steps = 10;                      ///< that are timed
  int64_t memory_limit_mb = 0;             ///< of what a rank may hold; 0: none
  /// Whether the limit is of the "tensors" that a rank holds, as `peak_bytes` counts them, or of its "process": a control group
  /// of Linux refuses more, or where none can be made, the system does for its data segment.
  std::string limit = "tensors";
  /// Whether the result is compared with that of the model unsharded, which each rank then holds at the beginning. Otherwise the
  /// model is built on the meta device, and its weights are the recipe's.
  bool verify = true;
};

/// Whose rows a batch is made of.
struct BenchPlace {
  int rank = 0;
  int ranks = 1;
  int64_t step = 0; ///< from 0
};

/// A model to measure.
struct BenchModel {
  std::shared_ptr<torch::nn::Module> module;
  std::vector<std::shared_ptr<torch::nn::Module>> blocks; ///< below the module; each becomes a group, the rest another
  /// A forward of `module`: the mean loss over the rows of a batch, a tensor of one element that needs a gradient.
  std::function<at::Tensor(const std::vector<at::Tensor>& batch)> loss;
};

/// How to make a model and what it trains on. The functions are called in each rank's process; what they throw is the case's
/// result.
struct BenchRecipe {
  /// Uses what it needs of the settings: layers, width, sequence, recompute. It is called after `torch::manual_seed(1)`, so that
  /// the weights are the same on all ranks. Without `BenchSettings::verify` the new tensors are on the meta device.
  std::function<BenchModel(const BenchSettings&)> model;
  /// Tensors of `settings.batch` rows each (dim 0), a function of its arguments alone. Other sizes of dim 0 are an error.
  std::function<std::vector<at::Tensor>(const BenchSettings&, const BenchPlace&)> batch;
  /// What a rank takes in a step, for `items_per_second`: tokens, say. Unset: rows.
  std::function<int64_t(const BenchSettings&)> items = nullptr;
  /// Gives a sharded model that was built on the meta device its weights, for example by `checkpoint::load`. Every rank calls it.
  /// Unset: matrices are drawn with a deviation of 0.02, vectors named "weight" are 1, others 0.
  std::function<void(torch::nn::Module&)> weights = nullptr;
};

/// The models of a program by name.
class BenchModels {
 public:
  /// An error for a name that is taken or empty, and for a recipe without `model` or `batch`.
  BenchModels& add(const std::string& name, BenchRecipe recipe);
  const std::vector<std::pair<std::string, BenchRecipe>>& recipes() const { return recipes_; } ///< in the order of `add`

 private:
  std::vector<std::pair<std::string, BenchRecipe>> recipes_;
};

/// A chosen set of cases.
struct BenchMatrix {
  std::vector<BenchSettings> cases;
  double time_limit_seconds = 120; ///< of a case, whose processes are killed then
};

/// The matrix that a JSON text describes: `{"common": {…}, "product": {key: [value, …], …}, "cases": [{…}, …],
/// "time_limit_seconds": 60}`, each of which may be left out: all combinations of the product's values, then the cases, each case
/// once; what they leave out is as in `common`. Throws c10::Error that names `origin` and an unknown key with the nearest one
/// that there is, or a value that cannot be.
BenchMatrix parse_bench_matrix(const std::string& text, const BenchModels& models, const std::string& origin = "the matrix");

/// What came of a case.
struct BenchResult {
  BenchSettings settings;
  std::string status;  ///< "ok", "impossible", "does not fit", "time limit", "died", "wrong" or "failed"
  std::string message; ///< why it is not ok
  double seconds = 0;  ///< that the case took, with the start of its processes
  /// Of a case that is ok: a JSON object with the fields of docs/benchmarks.md. The most asked for are also below.
  std::string measured;
  double milliseconds = 0; ///< the median of a run
  double items_per_second = 0;
  int64_t state_bytes = 0;
  int64_t peak_bytes = 0;
};

struct BenchReport {
  std::vector<BenchResult> results; ///< in the order of the matrix
  /// Cases that are neither ok nor impossible.
  int failed() const;
  /// A table with a row for each case.
  std::string to_string() const;
};

struct BenchOptions {
  /// The file of results, which tessera-report plots. It is replaced as a whole after each case, and what it has already is not
  /// measured again.
  std::filesystem::path results = "runs/bench.json";
  /// Gets a line after each case.
  std::function<void(const std::string& line)> progress = nullptr;
};

/// Measures the cases that the file of results does not have yet, each in fresh processes: a case that fails, or whose ranks die,
/// is a result, and the next one follows.
///
/// The processes of a case run this program once more with the same arguments, as those of `launch`: code before the call runs in
/// them too, the call does their part and returns nothing, and the program is to end then. So call it once, before any process
/// group, with models that are the same each time. Throws c10::Error for settings that no case can have, and where the file
/// cannot be written, or is of another program, version, machine or build.
std::optional<BenchReport> run_bench(const BenchModels& models, const BenchMatrix& matrix, const BenchOptions& options = {});

struct BenchMainOptions {
  BenchSettings defaults; ///< of the settings that no flag names
  int own_arguments = 0;  ///< words after the program's name that are the program's own
};

/// A whole program, as tessera-bench is one: `return tessera::bench_main(argc, argv, models);`.
///
///   --matrix FILE     the cases of a file
///   --out FILE        where the results go
///   --time-limit S    of a case, in seconds
///   --NAME A,B        a setting: all combinations of such lists are measured; without --strategy all strategies
///   --help            what this says, with the settings, and the registered models
///
/// Prints a line for each case. Returns the status for `main`: 0 where all cases are ok or impossible; 1 where some failed, or
/// after an error, whose text goes to standard error.
int bench_main(int argc, char** argv, const BenchModels& models, const BenchMainOptions& options = {}) noexcept;

} // namespace tessera
