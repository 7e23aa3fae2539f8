#pragma once

#include <absl/container/flat_hash_map.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace minilm {

/// The WordPiece tokenizer of uncased BERT models: the same ids as Hugging Face's `tokenizers`.
class Tokenizer {
 public:
  /// Reads the file `vocabulary` (vocab.txt): one word piece a line, its id is the line's number from 0. An error when it cannot
  /// be read, names a piece twice, or lacks one of [PAD], [UNK], [CLS], [SEP], [MASK].
  explicit Tokenizer(const std::string& vocabulary);

  /// [CLS], the word pieces of `text`, [SEP]: at most `longest` ids (at least 2), what is beyond them is cut off. A special token
  /// that stands in the text is that token. An error when `text` is not UTF-8.
  std::vector<int64_t> encode(std::string_view text, size_t longest) const;

  int64_t padding() const { return padding_; }
  int64_t size() const { return static_cast<int64_t>(ids_.size()); }

 private:
  int64_t id(const std::string& special) const;
  void append_words(std::string_view text, std::vector<int64_t>& ids) const;
  void append_pieces(std::string_view word, std::vector<int64_t>& ids) const;

  std::string path_;
  absl::flat_hash_map<std::string, int64_t> ids_;
  std::vector<std::pair<std::string, int64_t>> special_;
  int64_t padding_, unknown_, begin_, end_;
};

} // namespace minilm
