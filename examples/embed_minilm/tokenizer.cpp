#include "embed_minilm/tokenizer.h"

#include <absl/strings/str_split.h>
#include <absl/strings/strip.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "common/files.h"
#include "embed_minilm/words.h"

namespace minilm {
namespace {

constexpr size_t kLongestWord = 100; // characters; a longer word is unknown

absl::flat_hash_map<std::string, int64_t> read_vocabulary(const std::string& path) {
  const auto content = examples::read_file(path, "the vocabulary");
  absl::flat_hash_map<std::string, int64_t> ids;
  int64_t line = 0;
  for (const auto piece : absl::StrSplit(absl::StripSuffix(content, "\n"), '\n')) {
    const auto [found, is_new] = ids.emplace(absl::StripSuffix(piece, "\r"), line);
    TORCH_CHECK(is_new, "the vocabulary ", path, " has '", found->first, "' in line ", found->second + 1, " and line ", line + 1);
    ++line;
  }
  return ids;
}

bool starts_character(char c) { return (c & 0xc0) != 0x80; }

} // namespace

Tokenizer::Tokenizer(const std::string& vocabulary)
    : path_(vocabulary),
      ids_(read_vocabulary(vocabulary)),
      padding_(id("[PAD]")),
      unknown_(id("[UNK]")),
      begin_(id("[CLS]")),
      end_(id("[SEP]")) {
  for (const char* token : {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}) special_.emplace_back(token, id(token));
}

int64_t Tokenizer::id(const std::string& special) const {
  const auto found = ids_.find(special);
  TORCH_CHECK(found != ids_.end(), "the vocabulary ", path_, " has no ", special);
  return found->second;
}

std::vector<int64_t> Tokenizer::encode(std::string_view text, size_t longest) const {
  TORCH_CHECK(longest >= 2, "a text of ", longest, " word pieces has no room for [CLS] and [SEP]");
  std::vector<int64_t> ids{begin_};
  size_t plain = 0; // where the words after the last special token start
  for (size_t at = 0; at < text.size();) {
    const auto found = std::find_if(special_.begin(), special_.end(),
                                    [&](const auto& token) { return text.substr(at).starts_with(token.first); });
    if (found == special_.end()) {
      ++at;
      continue;
    }
    append_words(text.substr(plain, at - plain), ids);
    ids.push_back(found->second);
    plain = at += found->first.size();
  }
  append_words(text.substr(plain), ids);
  ids.resize(std::min(ids.size(), longest - 1));
  ids.push_back(end_);
  return ids;
}

void Tokenizer::append_words(std::string_view text, std::vector<int64_t>& ids) const {
  for (const auto& word : words_of(text)) append_pieces(word, ids);
}

// The longest piece that the word starts with, then the longest that goes on, and so on. A word that cannot be put together so is
// unknown as a whole.
void Tokenizer::append_pieces(std::string_view word, std::vector<int64_t>& ids) const {
  if (characters_in(word) > kLongestWord) return ids.push_back(unknown_);
  const auto before = ids.size();
  std::string piece;
  for (size_t begin = 0; begin < word.size();) {
    size_t end = word.size();
    auto found = ids_.end();
    for (; end > begin; --end) {
      if (end < word.size() && !starts_character(word[end])) continue;
      piece = begin > 0 ? "##" : "";
      piece += word.substr(begin, end - begin);
      if (found = ids_.find(piece); found != ids_.end()) break;
    }
    if (found == ids_.end()) {
      ids.resize(before);
      return ids.push_back(unknown_);
    }
    ids.push_back(found->second);
    begin = end;
  }
}

} // namespace minilm
