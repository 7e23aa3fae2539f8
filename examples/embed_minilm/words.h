#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace minilm {

/// The words of a text as uncased BERT splits it (BertNormalizer and BertPreTokenizer of Hugging Face's `tokenizers`): control
/// characters removed, accents removed, lower case, cut at white space and around every punctuation and CJK character. UTF-8; an
/// error that says at which byte when `text` is not.
std::vector<std::string> words_of(std::string_view text);

/// How many characters the UTF-8 string `word` has.
size_t characters_in(std::string_view word);

} // namespace minilm
