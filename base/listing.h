#pragma once

#include <algorithm>
#include <string>
#include <vector>

namespace tessera::internal {

/// Lists names for errors: one indented line for each; after the first 20 only how many more there are.
inline std::string listing(const std::vector<std::string>& names) {
  constexpr size_t kShown = 20;
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i) text += "\n  " + names[i];
  if (names.size() > kShown) text += "\n  and " + std::to_string(names.size() - kShown) + " more";
  return text;
}

} // namespace tessera::internal
