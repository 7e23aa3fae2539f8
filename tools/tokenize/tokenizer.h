#pragma once

#include <absl/container/flat_hash_map.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "added_tokens.h"
#include "model.h"
#include "normalizers.h"
#include "post_processor.h"
#include "pre_tokenizers.h"

namespace tokenize {

/// Tokens of words that were seen before: each thread has its own.
class WordCache {
 public:
  const std::vector<int64_t>* find(std::string_view word) const;
  void keep(std::string_view word, std::vector<int64_t> ids);

 private:
  absl::flat_hash_map<std::string, std::vector<int64_t>> words_;
};

/// A tokenizer.json of Hugging Face, with the ids of its library `tokenizers`. Truncation and padding in the file are ignored: a
/// document is tokenized as a whole. Safe to use from several threads.
class Tokenizer {
 public:
  /// Errors name the file and the key: a file that cannot be read, is damaged, or has a part that is not supported.
  explicit Tokenizer(const std::string& path);

  /// The ids of a text. With `adds_special_tokens`, those around it as well that the file's "post_processor" adds. Errors: text
  /// that is not UTF-8, with the byte; 2^31 bytes and more.
  std::vector<int64_t> encode(std::string_view text, bool adds_special_tokens, WordCache& cache) const;

  /// All ids are below it.
  int64_t vocabulary() const { return vocabulary_; }
  /// The id of a token; an error where there is none.
  int64_t id(const std::string& token) const;

 private:
  void read_added_tokens(const tessera::internal::JsonView& json);
  void append_plain(std::string_view text, std::vector<int64_t>& ids, WordCache& cache) const;

  std::string path_;
  Normalizer normalize_;
  PreTokenizer pre_tokenize_;
  std::unique_ptr<Model> model_;
  AddedTokens raw_tokens_, normalized_tokens_;
  Vocabulary added_ids_;
  Frame frame_;
  int64_t vocabulary_ = 0;
};

} // namespace tokenize
