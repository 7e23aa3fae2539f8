#pragma once

#include <tessera/checkpoint/bytes/json.h>

#include <cstdint>
#include <vector>

namespace tokenize {

/// Special tokens around a text.
struct Frame {
  std::vector<int64_t> before, after;
};

/// The "post_processor" of a tokenizer.json, for single texts: null, TemplateProcessing, BertProcessing, RobertaProcessing,
/// ByteLevel, and a Sequence of them. Any other is an error that names it.
Frame read_post_processor(const tessera::internal::JsonView& json);

} // namespace tokenize
