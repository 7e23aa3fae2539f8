#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "characters.h"

namespace tokenize {

/// A part of a text: one match of a pattern, or what is between two.
struct Stretch {
  size_t begin, end; ///< bytes
  bool is_match;
};

/// Finds all matches in a text, from left to right. The stretches cover the text.
using Pattern = std::function<std::vector<Stretch>(std::string_view text)>;

/// A regular expression of Oniguruma with its Ruby syntax, as `tokenizers` has them; ICU finds its matches. The classes \s and \w
/// are Oniguruma's. `where` begins the error for what means something else in ICU, or is wrong.
Pattern regex_pattern(const std::string& expression, const std::string& where);
/// This text.
Pattern text_pattern(const std::string& literal);
/// Each character of a kind.
Pattern character_pattern(bool (*is_one)(Character));

/// What becomes of the matches where a text is split.
enum class SplitBehavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };

/// The parts into which the stretches split `text`; none is empty.
std::vector<std::string> split(std::string_view text, std::vector<Stretch> stretches, SplitBehavior behavior);

} // namespace tokenize
