#pragma once

#include <tessera/checkpoint/bytes/json.h>

#include <functional>
#include <string>

namespace tokenize {

/// Rewrites a text of UTF-8.
using Normalizer = std::function<std::string(std::string)>;

/// The "normalizer" of a tokenizer.json: null, NFC, NFD, NFKC, NFKD, Lowercase, StripAccents, BertNormalizer, and a Sequence of
/// them. Any other is an error that names it.
Normalizer read_normalizer(const tessera::internal::JsonView& json);

} // namespace tokenize
