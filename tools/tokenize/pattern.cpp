#include "pattern.h"

#include <algorithm>

namespace tokenize {

namespace {

/// Adds the stretch before a match, and the match.
void add_match(std::vector<Stretch>& stretches, size_t begin, size_t end) {
  const auto before = stretches.empty() ? 0 : stretches.back().end;
  if (before < begin) stretches.push_back({before, begin, false});
  stretches.push_back({begin, end, true});
}

void add_rest(std::vector<Stretch>& stretches, size_t size) {
  const auto before = stretches.empty() ? 0 : stretches.back().end;
  if (before < size) stretches.push_back({before, size, false});
}

/// A run of stretches of one kind is one.
std::vector<Stretch> contiguous(const std::vector<Stretch>& stretches) {
  std::vector<Stretch> merged;
  for (const auto& each : stretches) {
    if (!merged.empty() && merged.back().is_match == each.is_match) {
      merged.back().end = each.end;
    } else {
      merged.push_back(each);
    }
  }
  return merged;
}

/// Each match after a stretch that is none joins it.
std::vector<Stretch> merged_with_previous(const std::vector<Stretch>& stretches) {
  std::vector<Stretch> merged;
  bool follows_match = false;
  for (const auto& each : stretches) {
    if (each.is_match && !follows_match && !merged.empty()) {
      merged.back().end = each.end;
    } else {
      merged.push_back(each);
    }
    follows_match = each.is_match;
  }
  return merged;
}

std::vector<Stretch> merged_with_next(std::vector<Stretch> stretches) {
  std::vector<Stretch> merged; // from right to left
  bool precedes_match = false;
  std::reverse(stretches.begin(), stretches.end());
  for (const auto& each : stretches) {
    if (each.is_match && !precedes_match && !merged.empty()) {
      merged.back().begin = each.begin;
    } else {
      merged.push_back(each);
    }
    precedes_match = each.is_match;
  }
  std::reverse(merged.begin(), merged.end());
  return merged;
}

} // namespace

Pattern text_pattern(const std::string& literal) {
  return [literal](std::string_view text) {
    std::vector<Stretch> stretches;
    for (auto at = literal.empty() ? std::string_view::npos : text.find(literal); at != std::string_view::npos;
         at = text.find(literal, at + literal.size())) {
      add_match(stretches, at, at + literal.size());
    }
    add_rest(stretches, text.size());
    return stretches;
  };
}

Pattern character_pattern(bool (*is_one)(Character)) {
  return [is_one](std::string_view text) {
    std::vector<Stretch> stretches;
    size_t at = 0;
    for_each_character(text, [&](Character c) {
      const auto end = at + static_cast<size_t>(U8_LENGTH(c));
      if (is_one(c)) add_match(stretches, at, end);
      at = end;
    });
    add_rest(stretches, text.size());
    return stretches;
  };
}

std::vector<std::string> split(std::string_view text, std::vector<Stretch> stretches, SplitBehavior behavior) {
  switch (behavior) {
    case SplitBehavior::kRemoved: std::erase_if(stretches, [](const Stretch& each) { return each.is_match; }); break;
    case SplitBehavior::kIsolated: break;
    case SplitBehavior::kMergedWithPrevious: stretches = merged_with_previous(stretches); break;
    case SplitBehavior::kMergedWithNext: stretches = merged_with_next(std::move(stretches)); break;
    case SplitBehavior::kContiguous: stretches = contiguous(stretches); break;
  }
  std::vector<std::string> parts;
  for (const auto& [begin, end, is_match] : stretches) {
    if (begin < end) parts.emplace_back(text.substr(begin, end - begin));
  }
  return parts;
}

} // namespace tokenize
