#include "settings.h"

#include <c10/util/Exception.h>
#include <tessera/base/edit_distance.h>
#include <tessera/fsdp/communication.h>
#include <tessera/fsdp/strategy.h>

#include <algorithm>
#include <charconv>
#include <functional>
#include <numeric>

#include "optimizers.h"

namespace tessera::benchmarks {

namespace {

constexpr int64_t kLargestNumber = 1'000'000'000;
constexpr int kMostRanks = 64;

template <typename Anything, typename Visit> // void(const char* name, auto& value)
void for_each(Anything& settings, const Visit& visit) {
  visit("measure", settings.measure);
  visit("model", settings.model);
  visit("layers", settings.layers);
  visit("width", settings.width);
  visit("batch", settings.batch);
  visit("sequence", settings.sequence);
  visit("ranks", settings.ranks);
  visit("mesh", settings.mesh);
  visit("strategy", settings.strategy);
  visit("layout", settings.layout);
  visit("optimizer", settings.optimizer);
  visit("reshard", settings.reshard);
  visit("precision", settings.precision);
  visit("transport", settings.transport);
  visit("offload", settings.offload);
  visit("recompute", settings.recompute);
  visit("quantize", settings.quantize);
  visit("transition", settings.transition);
  visit("steps", settings.steps);
  visit("memory_limit_mb", settings.memory_limit_mb);
  visit("limit", settings.limit);
  visit("verify", settings.verify);
}

void check_one_of(const char* key, const std::string& value, const std::vector<std::string>& choices) {
  std::string known;
  for (const auto& choice : choices) known += (known.empty() ? "" : ", ") + choice;
  const bool is_known = std::find(choices.begin(), choices.end(), value) != choices.end();
  TORCH_CHECK(is_known, key, " is '", value, "', but must be one of: ", known);
}

void check_at_least(const char* key, int64_t value, int64_t least) {
  TORCH_CHECK(value >= least, key, " is ", value, ", but must be at least ", least);
}

Strategy strategy_of(const std::string& name) {
  return std::find_if(kStrategies.begin(), kStrategies.end(), [&](const auto& row) { return row.name == name; })->strategy;
}

/// All of `text`, or nothing.
std::optional<int> number_in(const std::string& text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() ? std::optional(number) : std::nullopt;
}

/// Unset for "auto". Throws c10::Error for what `reshard` may not be.
std::optional<ReshardAfterForward> reshard_of(const std::string& text) {
  if (text == "auto") return std::nullopt;
  if (text == "true" || text == "false") return text == "true";
  const auto number = number_in(text);
  TORCH_CHECK(number && *number >= 1 && *number <= kMostRanks, "reshard is '", text,
              "', but must be auto, true, false or a number of ranks from 1 to ", kMostRanks);
  return *number;
}

/// "2x2" → {2, 2}.
std::vector<int64_t> parse_mesh(const std::string& text) {
  std::vector<int64_t> sizes;
  for (size_t begin = 0; begin <= text.size();) {
    const auto end = std::min(text.find('x', begin), text.size());
    const auto size = number_in(text.substr(begin, end - begin));
    TORCH_CHECK(size && *size > 0, "mesh is '", text, "', but must be sizes joined by x, such as 4 or 2x2");
    sizes.push_back(*size);
    begin = end + 1;
  }
  return sizes;
}

/// Which dims the strategy needs is no matter of the ranks.
void check_mesh(const Settings& settings) {
  if (settings.mesh.empty()) return;
  const size_t dims = row_of(strategy_of(settings.strategy)).outer ? 2 : 1;
  const auto sizes = parse_mesh(settings.mesh);
  TORCH_CHECK(sizes.size() <= 2, "mesh is '", settings.mesh, "', but must have at most two dims");
  TORCH_CHECK(sizes.size() == dims, "strategy ", settings.strategy, " needs a mesh of ", dims == 2 ? "two dims" : "one dim",
              ", but mesh is ", settings.mesh);
}

void check_numbers(const Settings& settings) {
  check_at_least("layers", settings.layers, 1);
  check_at_least("width", settings.width, 8);
  check_at_least("batch", settings.batch, 1);
  check_at_least("sequence", settings.sequence, 1);
  check_at_least("steps", settings.steps, 1);
  check_at_least("memory_limit_mb", settings.memory_limit_mb, 0);
  TORCH_CHECK(settings.width % 8 == 0, "width is ", settings.width, ", but must be a multiple of 8");
  TORCH_CHECK(settings.ranks >= 1 && settings.ranks <= kMostRanks, "ranks is ", settings.ranks, ", but must be from 1 to ",
              kMostRanks);
}

void check_value(const std::string& key, const nlohmann::json& known, const nlohmann::json& value) {
  const bool is_in_range = !value.is_number_integer() || (value >= 0 && value <= kLargestNumber);
  TORCH_CHECK(is_in_range, key, " is ", value.dump(), ", but must be from 0 to ", kLargestNumber);
  const bool is_alike = known.is_number() ? value.is_number_integer() : known.type() == value.type();
  const auto* const kind = known.is_number() ? "an integer" : known.is_boolean() ? "a boolean" : "a string";
  TORCH_CHECK(is_alike, key, " is ", value.dump(), ", but must be ", kind);
}

} // namespace

std::vector<std::string> strategy_names() {
  std::vector<std::string> names;
  for (const auto& row : kStrategies) names.emplace_back(row.name);
  return names;
}

std::vector<std::string> transitions() {
  const std::vector<std::string> placements{"R", "S(0)", "S(1)", "P"};
  std::vector<std::string> all;
  for (const auto& from : placements) {
    for (const auto& to : placements) {
      if (from != to && to != "P") all.push_back(from + " to " + to);
    }
  }
  return all;
}

nlohmann::ordered_json to_json(const Settings& settings) {
  nlohmann::ordered_json object;
  for_each(settings, [&](const char* name, const auto& value) { object[name] = value; });
  return object;
}

std::string nearest_setting(const std::string& name) {
  const auto settings = to_json(Settings{});
  std::string nearest;
  size_t distance = std::string::npos;
  for (const auto& [known, value] : settings.items()) {
    const auto away = internal::edit_distance(name, known);
    if (away < distance) nearest = known;
    distance = std::min(distance, away);
  }
  return nearest;
}

Settings settings_of(const nlohmann::json& object, const Settings& defaults) {
  TORCH_CHECK(object.is_object(), "a case is ", object.dump(), ", but must be an object");
  const auto known = to_json(defaults);
  for (const auto& [key, value] : object.items()) {
    TORCH_CHECK(known.contains(key), "unknown key '", key, "' of a case; the nearest is '", nearest_setting(key), '\'');
    check_value(key, known[key], value);
  }
  auto settings = defaults;
  for_each(settings, [&](const char* name, auto& value) {
    if (object.contains(name)) object[name].get_to(value);
  });
  return settings;
}

const BenchRecipe& recipe_of(const Settings& settings, const BenchModels& models) {
  std::vector<std::string> names;
  for (const auto& [name, recipe] : models.recipes()) {
    if (name == settings.model) return recipe;
    names.push_back(name);
  }
  check_one_of("model", settings.model, names);
  TORCH_INTERNAL_ASSERT(false);
}

void check(const Settings& settings, const BenchModels& models) {
  check_numbers(settings);
  check_one_of("measure", settings.measure, kMeasures);
  recipe_of(settings, models);
  check_one_of("strategy", settings.strategy, strategy_names());
  check_one_of("layout", settings.layout, {"ragged", "per-parameter"});
  check_one_of("optimizer", settings.optimizer, optimizer_names());
  check_one_of("precision", settings.precision, {"fp32", "bf16"});
  check_one_of("transport", settings.transport, {"shared_memory", "gloo"});
  check_one_of("offload", settings.offload, {"none", "host", "files"});
  check_one_of("limit", settings.limit, {"tensors", "process"});
  check_one_of("transition", settings.transition, transitions());
  if (!settings.mesh.empty()) parse_mesh(settings.mesh);
  shard_options(settings, {}); // throws for quantize and reshard
}

std::string why_impossible(const Settings& settings) try {
  mesh_shape(settings);
  if (reduces_by_itself(settings.optimizer) && settings.strategy != "no-shard")
    return settings.optimizer + " reduces between ranks that have the whole model: it needs the strategy no-shard";
  if (!settings.verify && (settings.measure == "gather" || settings.measure == "load"))
    return "what is gathered or loaded is compared with what it must be: " + settings.measure + " needs verify";
  return "";
} catch (const c10::Error& error) {
  return error.what_without_backtrace();
}

MeshShape mesh_shape(const Settings& settings) {
  check_mesh(settings);
  const auto strategy = strategy_of(settings.strategy);
  const bool has_groups = row_of(strategy).outer.has_value();
  std::vector<int64_t> sizes{settings.ranks};
  if (!settings.mesh.empty()) {
    sizes = parse_mesh(settings.mesh);
  } else if (has_groups) {
    TORCH_CHECK(settings.ranks % 2 == 0, "strategy ", settings.strategy, " on ", settings.ranks,
                " ranks needs a mesh: its default has 2 groups");
    sizes = {2, settings.ranks / 2};
  }
  const auto ranks = std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  TORCH_CHECK(ranks == settings.ranks, "mesh ", settings.mesh, " holds ", ranks, " ranks, but there are ", settings.ranks);
  if (has_groups) return {sizes, {strategy == Strategy::kHybridShard ? "replicate" : "outer", "shard"}};
  return {sizes, {strategy == Strategy::kNoShard ? "replicate" : "shard"}};
}

FullyShardOptions shard_options(const Settings& settings, const std::filesystem::path& folder) {
  FullyShardOptions options;
  options.strategy = strategy_of(settings.strategy);
  options.layout = settings.layout == "ragged" ? BufferLayout::kRagged : BufferLayout::kPerParameter;
  options.communication = communication_of(settings.quantize);
  options.reshard_after_forward = reshard_of(settings.reshard);
  if (settings.precision == "bf16") options.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kBFloat16};
  if (settings.offload == "host") options.offload = offload_to_host();
  if (settings.offload == "files") options.offload = offload_to_files(folder);
  return options;
}

} // namespace tessera::benchmarks
