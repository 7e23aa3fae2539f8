#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace tessera::testing {

/// The names of what lies in a folder, in any order.
inline std::vector<std::string> names_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) names.push_back(entry.path().filename().string());
  return names;
}

} // namespace tessera::testing
