#pragma once

// Internal: tables for people.

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::internal {

using TextRow = std::vector<std::string>;

/// A line a row, of which the first has the headings. Columns are as wide as their widest cell, in bytes. Those with the headings
/// `numbers` are aligned to the right.
std::string text_table(const std::vector<TextRow>& rows, std::initializer_list<std::string_view> numbers = {});

} // namespace tessera::internal
