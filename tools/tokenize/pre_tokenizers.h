#pragma once

#include <tessera/checkpoint/bytes/json.h>

#include <functional>
#include <string>
#include <vector>

namespace tokenize {

/// Splits pieces of a text further.
using PreTokenizer = std::function<std::vector<std::string>(std::vector<std::string> pieces)>;

/// The "pre_tokenizer" of a tokenizer.json: null, ByteLevel, Split, BertPreTokenizer, Digits, Punctuation,
/// WhitespaceSplit, and a Sequence of them. Any other is an error that names it.
PreTokenizer read_pre_tokenizer(const tessera::internal::JsonView& json);

} // namespace tokenize
