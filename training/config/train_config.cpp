#include <tessera/training/train_config.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include <tessera/training/config/batch.h>
#include <tessera/training/config/sections.h>
#include <tessera/training/config/values/config_text.h>
#include <tessera/training/config/values/config_values.h>

namespace tessera {

namespace {

using internal::ConfigValues;
using internal::Json;

/// Puts a value at "a.b.c".
void put(Json& root, const std::string& key, const Json& value) {
  auto* place = &root;
  size_t begin = 0;
  for (auto dot = key.find('.'); dot != std::string::npos; begin = dot + 1, dot = key.find('.', begin)) {
    place = &(*place)[key.substr(begin, dot - begin)];
  }
  (*place)[key.substr(begin)] = value;
}

/// The three numbers of the batch.
std::map<std::string, int64_t> batch_keys(const BatchConfig& batch) {
  return {{"train_batch_size", batch.train},
          {"train_micro_batch_size_per_gpu", batch.micro},
          {"gradient_accumulation_steps", batch.accumulation}};
}

Json resolved_of(const ConfigValues& values, const BatchConfig& batch) {
  Json root = Json::object();
  for (const auto& [key, value] : values.given()) put(root, key, value);
  for (const auto& [key, value] : batch_keys(batch)) root[key] = value;
  return root;
}

/// Keys of a block that the file does not have say nothing.
bool is_shown(const ConfigValues& values, const internal::ConfigKey& key) {
  const std::string name(key.name);
  if (key.type == internal::KeyType::kBlock || key.type == internal::KeyType::kAny) return values.given().count(name) != 0;
  if (values.has(name) || values.filled().count(name) != 0) return true;
  if (key.effect != internal::KeyEffect::kUsed || key.standard.empty() || key.standard == "null") return false;
  const auto dot = name.rfind('.');
  if (name.starts_with("zero_optimization.cpu_offload")) return false;                // old names
  if (name.starts_with("optimizer.") || name.starts_with("scheduler.")) return false; // the type's own defaults
  return dot == std::string::npos || values.has(name.substr(0, dot));
}

std::vector<TrainConfig::Line> lines_of(const ConfigValues& values, const BatchConfig& batch) {
  const auto computed = batch_keys(batch);
  std::vector<TrainConfig::Line> lines;
  for (const auto keys : {internal::deepspeed_keys(), internal::tessera_keys()}) {
    for (const auto& key : keys) {
      const std::string name(key.name);
      const auto filled = values.filled().find(name);
      const bool given = values.given().count(name) != 0;
      const auto origin = filled != values.filled().end() ? "auto: " + filled->second : std::string(given ? "file" : "default");
      const auto number = computed.find(name);
      if (number != computed.end()) {
        lines.push_back({name, std::to_string(number->second), given ? origin : "computed", key.here});
      } else if (is_shown(values, key)) {
        lines.push_back({name, internal::to_text(values.json(name)), origin, key.here});
      }
    }
  }
  return lines;
}

/// What the file gives; where it has neither the batch nor the micro-batch, what the program does.
internal::GivenBatch given_batch(const ConfigValues& values, const TrainArguments& arguments) {
  internal::GivenBatch given{values.optional_integer("train_batch_size"),
                             values.optional_integer("train_micro_batch_size_per_gpu"),
                             values.optional_integer("gradient_accumulation_steps")};
  if (given.train || given.micro) return given;
  given.micro = arguments.micro_batch_size;
  if (!given.accumulation) given.accumulation = arguments.accumulation_steps;
  return given;
}

using FlatValues = std::map<std::string, std::string>;

void add_flat(const Json& block, const std::string& prefix, FlatValues& values) {
  for (const auto& [field, value] : block.items()) {
    const auto name = prefix + field;
    const auto* key = internal::find_key(name);
    if (key && key->type == internal::KeyType::kBlock && value.is_object()) {
      add_flat(value, name + '.', values);
    } else if (!key || key->effect == internal::KeyEffect::kUsed) {
      values[name] = internal::to_text(value);
    }
  }
}

/// The keys with an effect, with their full names.
FlatValues flat(const std::string& text, const std::string& source) {
  FlatValues values;
  add_flat(internal::parse_config(text, source), "", values);
  return values;
}

/// What a key is in a config that may not have it.
std::string value_in(const FlatValues& values, const std::string& name) {
  if (const auto found = values.find(name); found != values.end()) return found->second;
  const auto* key = internal::find_key(name);
  return key && !key->standard.empty() ? std::string(key->standard) : "not given";
}

std::string text_of_file(const std::string& path) {
  TORCH_CHECK(!std::filesystem::is_directory(path), "cannot read the config ", path, ": it is a folder");
  std::ifstream file(path);
  TORCH_CHECK(file, "cannot read the config ", path, ": ", std::strerror(errno)); // NOLINT(concurrency-mt-unsafe)
  std::stringstream content;
  content << file.rdbuf();
  TORCH_CHECK(!file.bad(), "cannot read the config ", path);
  return content.str();
}

} // namespace

TrainConfig TrainConfig::parse(const std::string& text, const TrainArguments& arguments, const std::string& source) {
  ConfigValues values(internal::parse_config(text, source), arguments, source);
  TrainConfig config;
  config.source_ = source;
  config.sharding = internal::sharding_of(values, arguments.ranks);
  config.batch = internal::complete_batch(given_batch(values, arguments), internal::data_ranks(config.sharding), source);
  config.precision = internal::precision_of(values);
  config.optimizer = internal::optimizer_of(values);
  TORCH_CHECK_VALUE(!reduces_by_itself(config.optimizer) || config.sharding.strategy == Strategy::kNoShard,
                    values.where("optimizer.type"), " is ", values.text("optimizer.type"),
                    ", which reduces between ranks that have the whole model: it needs zero_optimization.stage 0");
  config.schedule = internal::schedule_of(values);
  config.trainer = internal::trainer_options_of(values, config.batch);
  for (const auto* name : {"model", "data"}) {
    const auto key = std::string("tessera.") + name;
    const auto block = values.json(key);
    TORCH_CHECK_VALUE(block.is_null() || block.is_object(), values.where(key), " is ", internal::to_text(block),
                      ", but must be a block");
    config.own_[name] = block.is_null() ? "{}" : internal::dump_json(block, values.where(key));
  }
  config.notes = values.notes();
  config.resolved_ = internal::dump_json(resolved_of(values, config.batch), source);
  config.lines_ = lines_of(values, config.batch);
  return config;
}

TrainConfig TrainConfig::read(const std::string& path, const TrainArguments& arguments) {
  return parse(text_of_file(path), arguments, path);
}

OwnSettings TrainConfig::own(const std::string& name) const {
  const auto found = own_.find(name);
  TORCH_CHECK_VALUE(found != own_.end() || own_.empty(), "a config has no block tessera.", name,
                    " for a program: model and data are there");
  return {found == own_.end() ? "{}" : found->second, source_ + ": tessera." + name};
}

std::vector<std::string> differences(const std::string& saved, const TrainConfig& here) {
  const auto before = flat(saved, "the saved config"), now = flat(here.resolved(), "the config");
  std::set<std::string> names;
  for (const auto* values : {&before, &now}) {
    for (const auto& [name, value] : *values) names.insert(name);
  }
  std::vector<std::string> lines;
  for (const auto& name : names) {
    const auto was = value_in(before, name), is = value_in(now, name);
    if (was != is) lines.push_back(fmt::format("{}: saved {}, here {}", name, was, is));
  }
  return lines;
}

} // namespace tessera
