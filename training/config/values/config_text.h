#pragma once

// Internal: JSON as people write it.

#include <string>

#include <tessera/checkpoint/bytes/json.h>

namespace tessera::internal {

/// Replaces what JSON lacks by blanks: comments (`//`, `#`, `/* */`) and commas before a closing bracket. Lines and columns
/// stay. An error for a comment that does not end.
std::string plain_json(const std::string& text, const std::string& source);

/// Parses a config: a JSON object with what `plain_json` takes out. Errors name the file and the place, a key that appears twice,
/// and a file that is YAML.
Json parse_config(const std::string& text, const std::string& source);

} // namespace tessera::internal
