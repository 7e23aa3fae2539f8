#pragma once

#include <string>

namespace tools {

/// The content of a YAML file as JSON. Plain scalars are what YAML 1.1 makes of them, as in Python: `no` is false, `'no'` a text.
/// Errors name the file, and the line where the syntax is wrong; a key that appears twice; a file that is no mapping.
std::string json_of_yaml(const std::string& path);

} // namespace tools
