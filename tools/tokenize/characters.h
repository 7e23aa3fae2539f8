#pragma once

#include <unicode/utf8.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace tokenize {

/// A Unicode character, as ICU numbers them.
using Character = UChar32;

/// The byte of the first character that is no UTF-8; none in text that is.
int64_t find_malformed(std::string_view text);

void append(std::string& text, Character c);

/// Calls `visit(c)` for each character of UTF-8.
template <typename Visit>
void for_each_character(std::string_view text, const Visit& visit) {
  const auto size = static_cast<int32_t>(text.size());
  for (int32_t at = 0; at < size;) {
    Character c = 0;
    U8_NEXT(text, at, size, c);
    visit(c);
  }
}

size_t count_characters(std::string_view text);

/// Rust's `char::is_whitespace`, and `\s` of its and of Oniguruma's regular expressions.
bool is_space(Character c);
/// What `\w` of Rust's regular expressions matches.
bool is_word(Character c);
bool is_ascii_punctuation(Character c);
/// Rust's `char::to_lowercase`, which looks at no neighbours.
void append_lower(std::string& text, Character c);

/// The kinds of characters that Hugging Face's `tokenizers` knows by tables of its own, which are those of Unicode 8 and 9: no
/// later character is one.
bool is_bert_control(Character c);
bool is_bert_accent(Character c);
bool is_bert_punctuation(Character c);
bool is_combining_mark(Character c);
/// The blocks that BERT takes for Chinese.
bool is_bert_chinese(Character c);

} // namespace tokenize
