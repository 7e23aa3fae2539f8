#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tokenize {

/// A token that is found in the text before the model sees it.
struct AddedToken {
  std::string content;
  int64_t id = 0;
  bool is_single_word = false; ///< not inside of a word
  bool strips_left = false;    ///< with the white space before it
  bool strips_right = false;   ///< and after it
};

/// Finds tokens in a text: from left to right, and where several begin, the longest.
class AddedTokens {
 public:
  /// A part of the text, or a token in its place.
  struct Stretch {
    std::string_view text;
    std::optional<int64_t> id;
  };

  void add(AddedToken token);
  /// The stretches that are no tokens, and the tokens between them.
  std::vector<Stretch> split(std::string_view text) const;

 private:
  const AddedToken* find_at(std::string_view text, size_t at) const;

  std::array<std::vector<AddedToken>, 256> by_first_byte_; // the longest first
};

} // namespace tokenize
