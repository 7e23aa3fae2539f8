#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace minilm {

/// A sentence and its word pieces.
struct Sentence {
  std::string text;
  std::vector<int64_t> ids;
};

/// The word pieces of a sentence; an error for one that is not UTF-8.
using Tokenize = std::function<std::vector<int64_t>(std::string_view sentence)>;

/// The lines of the file `path`, each a sentence; an empty line is an empty sentence. An error that names the file and the line
/// for one that is not UTF-8, and for a file without lines.
std::vector<Sentence> read_sentences(const std::string& path, const Tokenize& tokenize);

/// Pairs of sentences that belong together: `first[i]` and `second[i]`.
struct Pairs {
  std::vector<std::vector<int64_t>> first, second;
  size_t size() const { return first.size(); }
};

/// The lines of the file `path`, each two sentences with a tab between them. Errors as above, and for a line with another number
/// of tabs.
Pairs read_pairs(const std::string& path, const Tokenize& tokenize);

} // namespace minilm
