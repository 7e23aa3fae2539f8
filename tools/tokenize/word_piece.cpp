#include <optional>
#include <utility>

#include "characters.h"
#include "model.h"

namespace tokenize {

namespace {

/// The longest token that the word begins with, then the longest that goes on, and so on. A word that cannot be put together so
/// is unknown as a whole.
class WordPiece final : public Model {
 public:
  explicit WordPiece(const tessera::internal::JsonView& json)
      : vocabulary_(read_vocabulary(json["vocab"])),
        prefix_(json.has("continuing_subword_prefix") ? json["continuing_subword_prefix"].string() : "##"),
        longest_(json.has("max_input_chars_per_word") ? static_cast<size_t>(json["max_input_chars_per_word"].non_negative())
                                                      : 100) {
    const auto unknown = json.has("unk_token") ? json["unk_token"].string() : "[UNK]";
    const auto found = vocabulary_.find(unknown);
    if (found == vocabulary_.end()) json.fail("the vocabulary lacks the token " + unknown + " for unknown words");
    unknown_ = found->second;
  }

  const Vocabulary& vocabulary() const override { return vocabulary_; }

  void append(std::string_view piece, std::vector<int64_t>& ids) const override {
    if (count_characters(piece) > longest_) return ids.push_back(unknown_);
    const auto before = ids.size();
    for (size_t begin = 0; begin < piece.size();) {
      const auto [id, end] = longest_token(piece, begin);
      if (!id) {
        ids.resize(before);
        return ids.push_back(unknown_);
      }
      ids.push_back(*id);
      begin = end;
    }
  }

 private:
  std::pair<std::optional<int64_t>, size_t> longest_token(std::string_view piece, size_t begin) const {
    auto token = begin > 0 ? prefix_ : std::string();
    const auto prefix = token.size();
    token += piece.substr(begin);
    while (token.size() > prefix) {
      if (const auto found = vocabulary_.find(token); found != vocabulary_.end()) {
        return {found->second, begin + token.size() - prefix};
      }
      while (U8_IS_TRAIL(token.back())) token.pop_back();
      token.pop_back();
    }
    return {std::nullopt, begin};
  }

  Vocabulary vocabulary_;
  std::string prefix_;
  size_t longest_;
  int64_t unknown_ = 0;
};

} // namespace

std::unique_ptr<Model> read_word_piece(const tessera::internal::JsonView& json) { return std::make_unique<WordPiece>(json); }

} // namespace tokenize
