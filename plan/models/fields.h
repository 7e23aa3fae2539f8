#pragma once

// Internal: fields of a config, which is untrusted.

#include <cstdint>
#include <string>

#include <tessera/base/edit_distance.h>
#include <tessera/checkpoint/bytes/json.h>

namespace tessera::internal::models {

/// Whether a field is there, and not null.
inline bool is_given(const JsonView& json, const std::string& key) { return json.has(key) && !json[key].json().is_null(); }

inline int64_t positive(const JsonView& json, const std::string& key) {
  const auto value = json[key].integer();
  constexpr int64_t kMost = int64_t{1} << 40; // so that products of a few fit
  if (value <= 0 || value > kMost) json[key].fail(c10::str("is ", value, ", but must be positive, and not above ", kMost));
  return value;
}
inline int64_t positive_or(const JsonView& json, const std::string& key, int64_t otherwise) {
  return is_given(json, key) ? positive(json, key) : otherwise;
}
inline double number_or(const JsonView& json, const std::string& key, double otherwise) {
  return is_given(json, key) ? json[key].number() : otherwise;
}
inline bool flag_or(const JsonView& json, const std::string& key, bool otherwise) {
  return is_given(json, key) ? json[key].boolean() : otherwise;
}
/// A number in [0, 1).
inline double chance_or(const JsonView& json, const std::string& key, double otherwise) {
  const auto value = number_or(json, key, otherwise);
  if (!(value >= 0 && value < 1)) json[key].fail(c10::str("is ", value, ", but must be in [0, 1)"));
  return value;
}

} // namespace tessera::internal::models
