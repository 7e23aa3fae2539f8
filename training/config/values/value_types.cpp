// Values in the types of the table.
#include <absl/strings/ascii.h>
#include <absl/strings/numbers.h>
#include <c10/util/Exception.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include <tessera/training/config/values/config_values.h>

namespace tessera::internal {

namespace {

std::optional<bool> boolean_of(const Json& value) {
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number_integer() && (value == 0 || value == 1)) return value == 1;
  if (!value.is_string()) return std::nullopt;
  bool result = false;
  const auto text = absl::AsciiStrToLower(value.get<std::string>());
  if (absl::SimpleAtob(text, &result)) return result;
  if (text == "on" || text == "off") return text == "on";
  return std::nullopt;
}

/// A finite one, which no text of another kind ("nan") makes.
std::optional<double> number_of(const Json& value) {
  double result = 0;
  if (value.is_number())
    result = value.get<double>();
  else if (!value.is_string() || !absl::SimpleAtod(value.get<std::string>(), &result))
    return std::nullopt;
  return std::isfinite(result) ? std::optional(result) : std::nullopt;
}

std::optional<int64_t> integer_of(const Json& value) {
  if (value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
    return std::nullopt;
  if (value.is_number_integer()) return value.get<int64_t>();
  constexpr double kEnd = 9.2e18;
  const auto number = number_of(value);
  if (!number || std::abs(*number) > kEnd || *number != std::floor(*number)) return std::nullopt;
  return static_cast<int64_t>(*number);
}

std::optional<Json> numbers_of(const Json& value) {
  if (!value.is_array()) return std::nullopt;
  auto list = Json::array();
  for (const auto& each : value) {
    const auto number = number_of(each);
    if (!number) return std::nullopt;
    list.push_back(*number);
  }
  return list;
}

std::optional<Json> texts_of(const Json& value) {
  if (value.is_string()) return Json::array({value});
  if (!value.is_array()) return std::nullopt;
  for (const auto& each : value) {
    if (!each.is_string()) return std::nullopt;
  }
  return value;
}

template <typename T>
std::optional<Json> as_json(const std::optional<T>& value) {
  return value ? std::optional<Json>(*value) : std::nullopt;
}

std::optional<Json> converted(KeyType type, const Json& value) {
  switch (type) {
    case KeyType::kBoolean: return as_json(boolean_of(value));
    case KeyType::kInteger: return as_json(integer_of(value));
    case KeyType::kNumber: return as_json(number_of(value));
    case KeyType::kText: return value.is_string() ? std::optional(value) : std::nullopt;
    case KeyType::kNumbers: return numbers_of(value);
    case KeyType::kTexts: return texts_of(value);
    case KeyType::kAny: return value;
    case KeyType::kBlock: break;
  }
  return value.is_object() ? std::optional(value) : std::nullopt;
}

Json choice_of(const ConfigKey& key, const Json& value, const std::string& where) {
  const auto choices = choices_of(key);
  auto lower = value.is_string() ? absl::AsciiStrToLower(value.get<std::string>()) : "";
  if (std::count(choices.begin(), choices.end(), lower) > 0) return lower;
  TORCH_CHECK_VALUE(false, where, " is ", internal::to_text(value), ", but must be one of ",
                    fmt::to_string(fmt::join(choices, ", ")), value.is_string() ? nearest_name(lower, choices) : "");
}

} // namespace

Json standard_of(const ConfigKey& key) { return key.standard.empty() ? Json() : Json::parse(key.standard); }

namespace {

/// A block that is not enabled, or of such blocks alone.
bool is_idle_block(const Json& block) {
  const auto enabled = block.find("enabled");
  if (enabled != block.end()) return *enabled == false || *enabled == "false";
  return std::all_of(block.begin(), block.end(), [](const Json& each) { return each.is_object() && is_idle_block(each); });
}

} // namespace

bool is_off(const ConfigKey& key, const Json& value) {
  if (value == standard_of(key) || value.is_null() || value == false) return true;
  return value.is_object() && is_idle_block(value);
}

Json as_type(const ConfigKey& key, const Json& value, const std::string& where) {
  if (value.is_null() && key.standard == "null") return value;
  if (!key.choices.empty()) return choice_of(key, value, where);
  const auto result = converted(key.type, value);
  TORCH_CHECK_VALUE(result, where, " is ", to_text(value), ", but must be of the type ", to_string(key.type));
  return *result;
}

} // namespace tessera::internal
