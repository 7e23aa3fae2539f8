#pragma once

#include <tessera/benchmarks/bench.h>
#include <tessera/fsdp/options.h>
#include <tessera/mesh/device_mesh.h>

#include <nlohmann/json.hpp>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace tessera::benchmarks {

using Settings = BenchSettings;

inline const std::vector<std::string> kMeasures{"step",       "gather", "reduction", "redistribution", "optimizer",
                                                "state_dict", "save",   "load",      "explain"};
/// "R to S(0)", …: all pairs of placements on one mesh dim that a DTensor may be redistributed between.
std::vector<std::string> transitions();
std::vector<std::string> strategy_names();

/// All of them, in the order of the struct.
nlohmann::ordered_json to_json(const Settings& settings);
/// What `object` does not name is as in `defaults`. Throws c10::Error that names an unknown key and the nearest that there is, or
/// a value of the wrong kind.
Settings settings_of(const nlohmann::json& object, const Settings& defaults = {});
/// The setting with the name that is nearest to an unknown one.
std::string nearest_setting(const std::string& name);

/// Throws c10::Error that names a value which no case can have: an unknown measure, a model that none of `models` is, no ranks.
void check(const Settings& settings, const BenchModels& models);
/// Why there is no such case although each value is one: a mesh that does not hold the ranks. Empty where there is one.
std::string why_impossible(const Settings& settings);

/// The recipe of the case's model. Throws c10::Error where there is none.
const BenchRecipe& recipe_of(const Settings& settings, const BenchModels& models);

/// The case's mesh: its dims are "shard", "replicate" or two. Throws c10::Error where it does not hold the ranks.
struct MeshShape {
  std::vector<int64_t> sizes;
  std::vector<std::string> names;
};
MeshShape mesh_shape(const Settings& settings);

/// What `fully_shard` takes. Files of offloaded state go to `folder`.
FullyShardOptions shard_options(const Settings& settings, const std::filesystem::path& folder);

/// Whether the loss, gradients and times are those of a training step.
inline bool is_of_a_step(const Settings& settings) { return settings.measure == "step"; }

} // namespace tessera::benchmarks
