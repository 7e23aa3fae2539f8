#include "part.h"

#include <algorithm>

namespace tokenize {

Part::Part(const tessera::internal::JsonView& json) : json_(json), type_(json["type"].string()) {}

void Part::allow(std::initializer_list<const char*> keys) const {
  for (const auto& [key, value] : json_.fields()) {
    const bool is_known =
        key == "type" || std::any_of(keys.begin(), keys.end(), [&key = key](const char* known) { return key == known; });
    if (!is_known) refuse("the key \"" + key + "\" of " + type_);
  }
}

bool Part::boolean(const std::string& key, bool otherwise) const { return has(key) ? json_[key].boolean() : otherwise; }

std::string Part::string(const std::string& key, const std::string& otherwise) const {
  return has(key) ? json_[key].string() : otherwise;
}

bool Part::has(const std::string& key) const { return json_.has(key) && !json_.json()[key].is_null(); }

void Part::refuse(const std::string& what) const { json_.fail("tessera-tokenize does not support " + what); }

} // namespace tokenize
