#pragma once

// Internal: how much two names differ, to name the nearest one in an error.

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::internal {

/// How many characters have to be put in, taken out or replaced to make `b` of `a` (Levenshtein).
size_t edit_distance(std::string_view a, std::string_view b);
/// The first of `names` that takes the fewest such changes; empty for no names.
std::string nearest_of(std::string_view name, const std::vector<std::string>& names);

} // namespace tessera::internal
