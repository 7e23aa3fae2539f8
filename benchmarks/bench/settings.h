#pragma once

#include <common/job_options.h>

#include <nlohmann/json.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera::benchmarks {

/// What one case of tessera-bench measures, and how. The names are those of the flags and of a matrix's keys.
struct Settings {
  std::string measure = "step"; ///< one of `kMeasures`
  std::string model = "gpt";    ///< one of `kModels`
  int64_t layers = 4;
  int64_t width = 64;
  int64_t batch = 4;     ///< rows a rank
  int64_t sequence = 64; ///< tokens a row, of the models that have any
  int ranks = 1;
  std::string mesh; ///< "2x2"; empty: from the strategy and the ranks
  std::string strategy = "full";
  std::string layout = "ragged";
  std::string optimizer = "adamw";         ///< one of train_gpt's
  std::string reshard = "auto";            ///< after forward: "auto", "true", "false", or a number of ranks
  std::string precision = "fp32";          ///< of forward and backward, and of reductions
  std::string transport = "shared_memory"; ///< or "gloo"
  std::string offload = "none";            ///< "none", "host" or "files"
  bool recompute = false;
  std::string quantize;                 ///< what `communication_of` takes, with spaces: "gather=int8 reduction=int4"
  std::string transition = "R to S(0)"; ///< of the measure redistribution, one of `transitions()`
  int64_t steps = 10;                   ///< that are timed
  int64_t memory_limit_mb = 0;          ///< of what a rank may hold; 0: none
};

inline const std::vector<std::string> kMeasures{"step",      "gather",     "reduction", "redistribution",
                                                "optimizer", "state_dict", "save",      "load"};
inline const std::vector<std::string> kModels{"gpt", "mlp", "resnet", "moe", "dlrm", "encoder"};
/// "R to S(0)", …: all pairs of placements on one mesh dim that a DTensor may be redistributed between.
std::vector<std::string> transitions();

/// All of them, in the order above.
nlohmann::ordered_json to_json(const Settings& settings);
/// What `object` does not name keeps its default. Throws c10::Error that names an unknown key, or a value of the wrong kind.
Settings settings_of(const nlohmann::json& object);

/// Throws c10::Error that names a value which no case can have: an unknown measure, no ranks.
void check(const Settings& settings);
/// Why there is no such case although each value is one: a mesh that does not hold the ranks. Empty where there is one.
std::string why_impossible(const Settings& settings);

/// What the examples' way of sharding takes, except `reshard` (see `reshard_of`). Throws c10::Error for a mesh that is no list of
/// sizes.
examples::JobOptions job_options(const Settings& settings);
/// Unset for "auto". Throws c10::Error for what `Settings::reshard` may not be.
std::optional<ReshardAfterForward> reshard_of(const Settings& settings);

} // namespace tessera::benchmarks
