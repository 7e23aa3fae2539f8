#include "settings.h"

#include <c10/util/Exception.h>
#include <common/command_line.h>
#include <gpt/optimizer.h>

#include <algorithm>
#include <charconv>

namespace tessera::benchmarks {

namespace {

using examples::check_at_least;

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
}

void check_one_of(const char* key, const std::string& value, const std::vector<std::string>& choices) {
  std::string known;
  for (const auto& choice : choices) known += (known.empty() ? "" : ", ") + choice;
  const bool is_known = std::find(choices.begin(), choices.end(), value) != choices.end();
  TORCH_CHECK(is_known, key, " is '", value, "', but must be one of: ", known);
}

std::vector<std::string> strategy_names() {
  std::vector<std::string> names;
  for (const auto& row : kStrategies) names.emplace_back(row.name);
  return names;
}

Strategy strategy_of(const std::string& name) {
  return std::find_if(kStrategies.begin(), kStrategies.end(), [&](const auto& row) { return row.name == name; })->strategy;
}

int ranks_of_reshard(const std::string& text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool is_number = error == std::errc() && end == text.data() + text.size();
  TORCH_CHECK(is_number && number >= 1 && number <= kMostRanks, "reshard is '", text,
              "', but must be auto, true, false or a number of ranks from 1 to ", kMostRanks);
  return number;
}

void check_numbers(const Settings& settings) {
  check_at_least<int64_t>("layers", settings.layers, 1);
  check_at_least<int64_t>("width", settings.width, 8);
  check_at_least<int64_t>("batch", settings.batch, 1);
  check_at_least<int64_t>("sequence", settings.sequence, 1);
  check_at_least<int64_t>("steps", settings.steps, 1);
  check_at_least<int64_t>("memory_limit_mb", settings.memory_limit_mb, 0);
  TORCH_CHECK(settings.width % 8 == 0, "width is ", settings.width, ", but must be a multiple of 8");
  TORCH_CHECK(settings.ranks >= 1 && settings.ranks <= kMostRanks, "ranks is ", settings.ranks, ", but must be from 1 to ",
              kMostRanks);
}

} // namespace

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

Settings settings_of(const nlohmann::json& object) {
  TORCH_CHECK(object.is_object(), "a case is ", object.dump(), ", but must be an object");
  const auto known = to_json(Settings{});
  for (const auto& [key, value] : object.items()) {
    TORCH_CHECK(known.contains(key), "unknown key '", key, "' of a case");
    const bool is_alike = known[key].is_number() ? value.is_number_integer() : known[key].type() == value.type();
    const bool is_in_range = !value.is_number_integer() || (value >= 0 && value <= kLargestNumber);
    TORCH_CHECK(is_in_range, key, " is ", value.dump(), ", but must be from 0 to ", kLargestNumber);
    TORCH_CHECK(is_alike, key, " is ", value.dump(), ", but must be ", known[key].is_number() ? "an integer" : "a",
                known[key].is_number()    ? ""
                : known[key].is_boolean() ? " boolean"
                                          : " string");
  }
  Settings settings;
  for_each(settings, [&](const char* name, auto& value) {
    if (object.contains(name)) object[name].get_to(value);
  });
  return settings;
}

void check(const Settings& settings) {
  check_numbers(settings);
  check_one_of("measure", settings.measure, kMeasures);
  check_one_of("model", settings.model, kModels);
  check_one_of("strategy", settings.strategy, strategy_names());
  check_one_of("layout", settings.layout, {"ragged", "per-parameter"});
  check_one_of("optimizer", settings.optimizer, gpt::optimizer_names());
  check_one_of("precision", settings.precision, {"fp32", "bf16"});
  check_one_of("transport", settings.transport, {"shared_memory", "gloo"});
  check_one_of("offload", settings.offload, {"none", "host", "files"});
  check_one_of("transition", settings.transition, transitions());
  job_options(settings); // throws for the mesh and for quantize
  reshard_of(settings);  // and for reshard
}

std::string why_impossible(const Settings& settings) try {
  examples::check_job(job_options(settings), settings.ranks);
  if (gpt::reduces_by_itself(settings.optimizer) && settings.strategy != "no-shard")
    return settings.optimizer + " reduces between ranks that have the whole model: it needs the strategy no-shard";
  return "";
} catch (const c10::Error& error) {
  return error.what_without_backtrace();
}

examples::JobOptions job_options(const Settings& settings) {
  examples::JobOptions options;
  options.ranks = settings.ranks;
  if (!settings.mesh.empty()) options.mesh = examples::parse_mesh(settings.mesh);
  options.strategy = strategy_of(settings.strategy);
  options.layout = settings.layout == "ragged" ? BufferLayout::kRagged : BufferLayout::kPerParameter;
  options.precision = settings.precision == "bf16" ? examples::Precision::kBf16 : examples::Precision::kFp32;
  options.reduce_precision = options.precision;
  options.communication = communication_of(settings.quantize);
  return options;
}

std::optional<ReshardAfterForward> reshard_of(const Settings& settings) {
  if (settings.reshard == "auto") return std::nullopt;
  if (settings.reshard == "true" || settings.reshard == "false") return settings.reshard == "true";
  return ranks_of_reshard(settings.reshard);
}

} // namespace tessera::benchmarks
