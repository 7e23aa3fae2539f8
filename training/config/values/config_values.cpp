#include <tessera/training/config/values/config_values.h>

#include <absl/strings/ascii.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>

#include <tessera/base/listing.h>
#include <tessera/training/config/values/auto_arguments.h>

namespace tessera::internal {

namespace {

constexpr auto *kZero = "zero_optimization", *kStage = "zero_optimization.stage", *kStrategy = "tessera.strategy";

/// Old names, and names that pydantic takes too, as those of the table.
Json with_todays_names(Json root, const std::string& source) {
  if (root.contains("bfloat16")) {
    TORCH_CHECK_VALUE(!root.contains("bf16"), source, ": both bf16 and bfloat16, its old name, are given");
    root["bf16"] = root["bfloat16"];
    root.erase("bfloat16");
  }
  if (!root.contains(kZero)) return root;
  auto& zero = root[kZero];
  if (zero.is_boolean()) zero = Json{{"stage", zero.get<bool>() ? 1 : 0}};
  if (!zero.is_object()) return root;
  Json renamed = Json::object();
  for (const auto& [name, value] : zero.items()) {
    const auto long_name = "stage3_" + name;
    const bool is_short = !find_key(fmt::format("{}.{}", kZero, name)) && find_key(fmt::format("{}.{}", kZero, long_name));
    TORCH_CHECK_VALUE(!is_short || !zero.contains(long_name), source, ": both ", kZero, '.', name, " and ", long_name,
                      " are given");
    renamed[is_short ? long_name : name] = value;
  }
  zero = renamed;
  return root;
}

} // namespace

ConfigValues::ConfigValues(const Json& root, const TrainArguments& arguments, std::string source) : source_(std::move(source)) {
  check_types(root);
  add_block(with_todays_names(root, source_), "");
  fill(arguments);
  check_stages();
  check_effects();
}

/// Comes before the parameters of these types, which the table does not have.
void ConfigValues::check_types(const Json& root) const {
  struct MissingType {
    const char *block, *name, *why;
  };
  constexpr auto kMissingTypes =
      std::to_array<MissingType>({{"optimizer", "muadam", "widths are not scaled"},
                                  {"optimizer", "muadamw", "widths are not scaled"},
                                  {"optimizer", "musgd", "widths are not scaled"},
                                  {"scheduler", "onecycle", "take a schedule of tessera.schedule"},
                                  {"scheduler", "lrrangetest", "take a schedule of tessera.schedule"}});
  for (const auto& [block, name, why] : kMissingTypes) {
    if (!root.contains(block) || !root[block].is_object()) continue;
    const auto type = root[block].value("type", Json());
    const bool is_missing = type.is_string() && absl::AsciiStrToLower(type.get<std::string>()) == name;
    TORCH_CHECK_NOT_IMPLEMENTED(!is_missing, where(std::string(block) + ".type"), " is ", to_text(type),
                                ", which is not here: ", why);
  }
}

void ConfigValues::add_block(const Json& block, const std::string& name) {
  for (const auto& [field, value] : block.items()) {
    const auto full = name.empty() ? field : name + '.' + field;
    const auto* key = find_key(full);
    TORCH_CHECK_VALUE(key, source_, ": the key ", full, " is unknown", nearest_name(field, names_in(name)));
    if (key->type == KeyType::kBlock) {
      if (value.is_null()) continue;
      add_block(as_type(*key, value, where(full)), full);
      blocks_.insert(full);
    } else {
      add(*key, value);
    }
  }
}

void ConfigValues::add(const ConfigKey& key, const Json& value) {
  const std::string name(key.name);
  values_[name] = is_auto(value) && key.type != KeyType::kAny ? value : as_type(key, value, where(name));
}

Json ConfigValues::json(const std::string& key) const {
  const auto found = values_.find(key);
  if (found != values_.end()) return found->second;
  const auto* row = find_key(key);
  TORCH_INTERNAL_ASSERT(row, key);
  return standard_of(*row);
}

int64_t stage_of(Strategy strategy) {
  const auto& inner = row_of(strategy).inner;
  return inner.parameters ? 3 : inner.gradients ? 2 : inner.optimizer_state ? 1 : 0;
}

int64_t ConfigValues::stage() const {
  const auto name = optional_text(kStrategy);
  if (has(kStage) || !name) return integer(kStage);
  const auto row = std::find_if(kStrategies.begin(), kStrategies.end(), [&](const auto& each) { return each.name == *name; });
  return stage_of(row->strategy); // the name is one of the key's choices
}

void ConfigValues::check_stages() const {
  constexpr int64_t kLast = 3;
  const auto stage = this->stage();
  TORCH_CHECK_VALUE(stage >= 0 && stage <= kLast, where(kStage), " is ", stage, ", but must be 0, 1, 2 or 3");
  const auto named = has(kStage) ? std::nullopt : optional_text(kStrategy);
  const auto why = named ? fmt::format("{} is {}", kStrategy, *named) : fmt::format("{} is {}", kStage, stage);
  for (const auto& [name, value] : values_) {
    const auto& key = *find_key(name);
    const auto [first, last] = key.stages;
    if ((stage >= first && stage <= last) || value == standard_of(key)) continue;
    const auto stages = first == last ? fmt::format("stage {}", first) : fmt::format("the stages {} to {}", first, last);
    TORCH_CHECK_VALUE(false, where(name), " is an option of ", stages, ", but ", why);
  }
}

void ConfigValues::check_effects() {
  for (const auto& [name, value] : values_) {
    const auto& key = *find_key(name);
    if (key.effect == KeyEffect::kUsed) continue;
    const bool off = is_off(key, value);
    TORCH_CHECK_NOT_IMPLEMENTED(key.effect != KeyEffect::kMissing || off, where(name),
                                value.is_object() ? "" : " is " + to_text(value) + ", which", " is not here: ", key.here);
    const bool is_idle = key.type == KeyType::kAny && off;
    if (key.effect == KeyEffect::kNone && !is_idle) notes_.push_back(fmt::format("{} has no effect here: {}", name, key.here));
  }
}

} // namespace tessera::internal
