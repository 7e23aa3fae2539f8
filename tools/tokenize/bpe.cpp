#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <queue>
#include <tuple>
#include <utility>

#include "characters.h"
#include "model.h"

namespace tokenize {

namespace {

using Pair = std::pair<int64_t, int64_t>;

struct Merged {
  int64_t rank, id;
};

/// Two neighbours that may become one token.
struct Candidate {
  int64_t rank;
  size_t place; ///< of the left one
  int64_t id;
  /// The lowest rank is on top of a heap, and of equal ones the leftmost.
  bool operator<(const Candidate& other) const { return std::tie(rank, place) > std::tie(other.rank, other.place); }
};

/// The tokens of a word while pairs of them are merged, each with its neighbours.
class Word {
 public:
  explicit Word(const absl::flat_hash_map<Pair, Merged>& merges) : merges_(merges) {}

  void add(int64_t id) { symbols_.push_back({id, symbols_.size() - 1, symbols_.size() + 1, true}); }

  void merge() {
    for (size_t i = 0; i + 1 < symbols_.size(); ++i) consider(i);
    while (!candidates_.empty()) {
      const auto best = candidates_.top();
      candidates_.pop();
      merge_at(best);
    }
  }

  void append_to(std::vector<int64_t>& ids) const {
    for (const auto& symbol : symbols_) {
      if (symbol.is_there) ids.push_back(symbol.id);
    }
  }

 private:
  struct Symbol {
    int64_t id;
    size_t previous, next; ///< places; beyond the word's at its ends
    bool is_there;
  };

  const Merged* merged(size_t place) const {
    const auto& left = symbols_[place];
    if (left.next >= symbols_.size()) return nullptr;
    const auto found = merges_.find(Pair(left.id, symbols_[left.next].id));
    return found == merges_.end() ? nullptr : &found->second;
  }

  void consider(size_t place) {
    if (const auto* pair = merged(place)) candidates_.push({pair->rank, place, pair->id});
  }

  void merge_at(const Candidate& best) {
    auto& left = symbols_[best.place];
    if (!left.is_there) return;
    const auto* pair = merged(best.place);
    if (pair == nullptr || pair->id != best.id) return; // other tokens are there now
    auto& right = symbols_[left.next];
    left.id = best.id;
    left.next = right.next;
    right.is_there = false;
    if (left.next < symbols_.size()) symbols_[left.next].previous = best.place;
    if (left.previous < symbols_.size()) consider(left.previous);
    consider(best.place);
  }

  const absl::flat_hash_map<Pair, Merged>& merges_;
  std::vector<Symbol> symbols_;
  std::priority_queue<Candidate> candidates_;
};

/// Byte-pair encoding: the characters of a word, of which neighbours are merged, those first that were merged first in training.
class Bpe final : public Model {
 public:
  explicit Bpe(const tessera::internal::JsonView& json)
      : vocabulary_(read_vocabulary(json["vocab"])),
        prefix_(text_of(json, "continuing_subword_prefix")),
        suffix_(text_of(json, "end_of_word_suffix")),
        fuses_unknown_(flag_of(json, "fuse_unk")),
        falls_back_to_bytes_(flag_of(json, "byte_fallback")),
        ignores_merges_(flag_of(json, "ignore_merges")) {
    if (json.has("dropout") && !json["dropout"].json().is_null() && json["dropout"].number() > 0) {
      json["dropout"].fail("tessera-tokenize does not support dropout, which draws other tokens each time");
    }
    if (const auto unknown = text_of(json, "unk_token"); !unknown.empty()) unknown_ = id_of(unknown, json["unk_token"]);
    read_merges(json["merges"]);
  }

  const Vocabulary& vocabulary() const override { return vocabulary_; }

  void append(std::string_view piece, std::vector<int64_t>& ids) const override {
    if (ignores_merges_) {
      if (const auto found = vocabulary_.find(absl::string_view(piece.data(), piece.size())); found != vocabulary_.end())
        return ids.push_back(found->second);
    }
    Word word(merges_);
    bool has_unknown = false;
    size_t at = 0;
    for_each_character(piece, [&](Character c) {
      const auto size = static_cast<size_t>(U8_LENGTH(c));
      has_unknown = add(piece, at, size, has_unknown, word);
      at += size;
    });
    if (has_unknown) word.add(*unknown_);
    word.merge();
    word.append_to(ids);
  }

 private:
  static std::string text_of(const tessera::internal::JsonView& json, const std::string& key) {
    return json.has(key) && !json[key].json().is_null() ? json[key].string() : std::string();
  }
  static bool flag_of(const tessera::internal::JsonView& json, const std::string& key) {
    return json.has(key) && json[key].boolean();
  }

  int64_t id_of(const std::string& token, const tessera::internal::JsonView& where) const {
    const auto found = vocabulary_.find(token);
    if (found == vocabulary_.end()) where.fail("the vocabulary lacks the token " + token);
    return found->second;
  }

  void read_merges(const tessera::internal::JsonView& json) {
    int64_t rank = 0;
    for (const auto& merge : json.elements()) {
      const auto [left, right] = pair_of(merge);
      if (!right.starts_with(prefix_)) merge.fail("the right part " + right + " does not begin with " + prefix_);
      const auto id = id_of(left + right.substr(prefix_.size()), merge);
      merges_[{id_of(left, merge), id_of(right, merge)}] = {rank++, id};
    }
  }

  /// "a b" or ["a", "b"].
  static std::pair<std::string, std::string> pair_of(const tessera::internal::JsonView& json) {
    if (json.json().is_array()) {
      const auto parts = json.strings();
      if (parts.size() != 2) json.fail("a merge has two parts");
      return {parts[0], parts[1]};
    }
    const auto& text = json.string();
    const auto space = text.find(' ');
    if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos) json.fail("a merge has two parts");
    return {text.substr(0, space), text.substr(space + 1)};
  }

  /// Adds a character of the piece. Takes and returns whether there are unknown ones that no token stands for yet: as in
  /// `tokenizers`, theirs comes before the next known character or, unless they are fused, the next unknown one.
  bool add(std::string_view piece, size_t at, size_t size, bool has_unknown, Word& word) const {
    auto token = at > 0 ? prefix_ : std::string();
    token += piece.substr(at, size);
    if (at + size == piece.size()) token += suffix_;
    if (const auto found = vocabulary_.find(token); found != vocabulary_.end()) {
      if (has_unknown) word.add(*unknown_);
      word.add(found->second);
      return false;
    }
    if (falls_back_to_bytes_) {
      if (const auto bytes = byte_tokens(token)) {
        for (const auto id : *bytes) word.add(id);
        return has_unknown;
      }
    }
    if (!unknown_) return false; // nothing is left of it
    if (has_unknown && !fuses_unknown_) word.add(*unknown_);
    return true;
  }

  std::optional<std::vector<int64_t>> byte_tokens(const std::string& text) const {
    std::vector<int64_t> ids;
    for (const char byte : text) {
      const auto found = vocabulary_.find(fmt::format("<0x{:02X}>", static_cast<uint8_t>(byte)));
      if (found == vocabulary_.end()) return std::nullopt;
      ids.push_back(found->second);
    }
    return ids;
  }

  Vocabulary vocabulary_;
  std::string prefix_, suffix_;
  bool fuses_unknown_, falls_back_to_bytes_, ignores_merges_;
  std::optional<int64_t> unknown_;
  absl::flat_hash_map<Pair, Merged> merges_;
};

} // namespace

std::unique_ptr<Model> read_bpe(const tessera::internal::JsonView& json) { return std::make_unique<Bpe>(json); }

} // namespace tokenize
