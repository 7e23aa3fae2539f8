#include "model.h"

namespace tokenize {

Vocabulary read_vocabulary(const tessera::internal::JsonView& json) {
  Vocabulary vocabulary;
  for (const auto& [token, id] : json.fields()) vocabulary.emplace(token, id.non_negative());
  if (vocabulary.empty()) json.fail("the vocabulary is empty");
  return vocabulary;
}

std::unique_ptr<Model> read_model(const tessera::internal::JsonView& json) {
  // Older files lack the type.
  const auto type = json.has("type") ? json["type"].string() : json.has("merges") ? "BPE" : "WordPiece";
  if (type == "BPE") return read_bpe(json);
  if (type == "WordPiece") return read_word_piece(json);
  json.fail("tessera-tokenize does not support the model " + type);
}

} // namespace tokenize
