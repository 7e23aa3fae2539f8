#include <tessera/training/config/keys/config_key.h>

#include <absl/strings/str_split.h>
#include <fmt/format.h>

#include <algorithm>

#include <tessera/base/edit_distance.h>

namespace tessera::internal {

const ConfigKey* find_key(std::span<const ConfigKey> keys, std::string_view name) {
  const auto found = std::find_if(keys.begin(), keys.end(), [&](const ConfigKey& key) { return key.name == name; });
  return found == keys.end() ? nullptr : &*found;
}

const ConfigKey* find_key(std::string_view name) {
  const auto* key = find_key(deepspeed_keys(), name);
  return key ? key : find_key(tessera_keys(), name);
}

std::vector<std::string> choices_of(const ConfigKey& key) {
  return absl::StrSplit(std::string(key.choices), '|', absl::SkipEmpty());
}

std::string_view to_string(KeyType type) {
  switch (type) {
    case KeyType::kBoolean: return "boolean";
    case KeyType::kInteger: return "integer";
    case KeyType::kNumber: return "number";
    case KeyType::kText: return "text";
    case KeyType::kNumbers: return "numbers";
    case KeyType::kTexts: return "texts";
    case KeyType::kAny: return "any";
    case KeyType::kBlock: break;
  }
  return "block";
}

std::string nearest_name(std::string_view name, const std::vector<std::string>& names) {
  const auto distance = [&](const std::string& other) { return edit_distance(name, other); };
  const auto nearest =
      std::min_element(names.begin(), names.end(), [&](const auto& a, const auto& b) { return distance(a) < distance(b); });
  if (nearest == names.end() || distance(*nearest) * 2 > std::max(name.size(), nearest->size())) return "";
  return fmt::format("; did you mean \"{}\"?", *nearest);
}

std::vector<std::string> names_in(std::span<const ConfigKey> keys, std::string_view block) {
  const std::string prefix = block.empty() ? "" : std::string(block) + '.';
  std::vector<std::string> names;
  for (const auto& key : keys) {
    if (!key.name.starts_with(prefix)) continue;
    const auto rest = key.name.substr(prefix.size());
    if (rest.find('.') == std::string_view::npos) names.emplace_back(rest);
  }
  return names;
}

std::vector<std::string> names_in(std::string_view block) {
  auto names = names_in(deepspeed_keys(), block);
  for (auto& name : names_in(tessera_keys(), block)) names.push_back(std::move(name));
  return names;
}

namespace {

std::string type_of(const ConfigKey& key) {
  if (key.choices.empty()) return std::string(to_string(key.type));
  std::string text;
  for (const auto& choice : choices_of(key)) text += (text.empty() ? "" : ", ") + choice;
  return text;
}

std::string effect_of(const ConfigKey& key) {
  std::string text(key.here);
  if (key.effect == KeyEffect::kNone) text = "no effect: " + text;
  if (key.effect == KeyEffect::kMissing) text = "**missing**: " + text;
  if (key.stages.first == key.stages.last) text += fmt::format(" (stage {})", key.stages.first);
  if (key.stages.first == 1) text += fmt::format(" (stages 1 to {})", key.stages.last);
  return text;
}

} // namespace

std::string markdown_table(std::span<const ConfigKey> keys) {
  std::string text = "| key | type | default | here |\n|---|---|---|---|\n";
  for (const auto& key : keys) {
    const auto standard = key.standard.empty() ? std::string() : fmt::format("{}", key.standard);
    text += fmt::format("| `{}` | {} | {} | {} |\n", key.name, type_of(key), standard, effect_of(key));
  }
  return text;
}

} // namespace tessera::internal
