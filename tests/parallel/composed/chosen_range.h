#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

namespace tessera::testing::composed {

/// The first and the last of a range like "500-999" in the environment variable `name`; nothing where it is not set.
inline std::optional<std::pair<int64_t, int64_t>> chosen_range(const char* name) {
  const char* const text = std::getenv(name);
  if (text == nullptr) return std::nullopt;
  char* end = nullptr;
  const auto first = std::strtoll(text, &end, 10);
  TORCH_CHECK(*end == '-', name, " is no range like 500-999: ", text);
  const auto last = std::strtoll(end + 1, &end, 10);
  TORCH_CHECK(*end == '\0' && last >= first, name, " is no range like 500-999: ", text);
  return std::pair<int64_t, int64_t>(first, last);
}

} // namespace tessera::testing::composed
