#pragma once

// Internal: how much two names differ, to name the nearest one in an error.

#include <cstddef>
#include <string_view>

namespace tessera::internal {

/// How many characters have to be put in, taken out or replaced to make `b` of `a` (Levenshtein).
size_t edit_distance(std::string_view a, std::string_view b);

} // namespace tessera::internal
