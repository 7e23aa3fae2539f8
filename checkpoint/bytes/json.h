#pragma once

// Internal: JSON that comes from a file is untrusted. These accessors check type and range, and their errors name the file and
// the field.

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/optim/state_value.h>

namespace tessera::internal {

using Json = nlohmann::json;

/// Parses one JSON object, nothing before or after it. Errors: wrong syntax, a key that appears twice in one object, nesting
/// deeper than 16. `source` (a path) begins every error.
Json parse_json(std::string_view text, const std::string& source);

/// One line of UTF-8 JSON; text that is not UTF-8 is an error.
std::string dump_json(const Json& json, const std::string& source);

/// A value inside a parsed file, with the place where it was found ("run/index.json: tensors[3].shape").
class JsonView {
 public:
  JsonView(const Json& json, std::string where) : json_(&json), where_(std::move(where)) {}

  const Json& json() const { return *json_; }
  const std::string& where() const { return where_; }

  bool has(const std::string& key) const { return json_->is_object() && json_->contains(key); }
  /// The field of an object; an error when the value is no object or lacks it.
  JsonView operator[](const std::string& key) const;
  /// The elements of an array.
  std::vector<JsonView> elements() const;
  /// The fields of an object, sorted by key.
  std::vector<std::pair<std::string, JsonView>> fields() const;

  const std::string& string() const;
  bool boolean() const;
  double number() const;
  int64_t integer() const;
  int64_t non_negative() const;
  std::vector<int64_t> non_negatives() const;
  std::vector<std::string> strings() const;

  [[noreturn]] void fail(const std::string& problem) const;

 private:
  const Json* json_;
  std::string where_;
};

/// {"f64": 0.1}, {"i64[]": [1, 2]}: the key is the type, so that every value comes back exactly. Non-finite numbers are the
/// strings "inf", "-inf" and "nan".
Json to_json(const StateValue& value);
StateValue state_value_from_json(const JsonView& json);
/// For people: what is not UTF-8 in a text, as a file of others may hold it, is replaced.
std::string to_text(const Json& json);
/// True also for NaN and NaN.
bool is_same(const StateValue& a, const StateValue& b);

} // namespace tessera::internal
