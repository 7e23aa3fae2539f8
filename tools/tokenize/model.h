#pragma once

#include <absl/container/flat_hash_map.h>
#include <tessera/checkpoint/bytes/json.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tokenize {

/// Ids of tokens by their text.
using Vocabulary = absl::flat_hash_map<std::string, int64_t>;

/// Turns a piece of text, such as a word, into tokens. Safe to call from several threads.
class Model {
 public:
  virtual ~Model() = default;
  virtual void append(std::string_view piece, std::vector<int64_t>& ids) const = 0;
  virtual const Vocabulary& vocabulary() const = 0;
};

/// The "model" of a tokenizer.json: BPE or WordPiece. Any other, and what is not supported of these, is an error that names it.
std::unique_ptr<Model> read_model(const tessera::internal::JsonView& json);

std::unique_ptr<Model> read_bpe(const tessera::internal::JsonView& json);
std::unique_ptr<Model> read_word_piece(const tessera::internal::JsonView& json);
Vocabulary read_vocabulary(const tessera::internal::JsonView& json);

} // namespace tokenize
