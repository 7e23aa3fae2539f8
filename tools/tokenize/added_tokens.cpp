#include "added_tokens.h"

#include <algorithm>
#include <utility>

#include "characters.h"

namespace tokenize {

namespace {

size_t first_byte(std::string_view text) { return static_cast<uint8_t>(text.front()); }

Character character_before(std::string_view text, size_t end) {
  Character c = 0;
  auto at = static_cast<int32_t>(end);
  const char* const bytes = text.data();
  U8_PREV(bytes, 0, at, c);
  return c;
}

Character character_after(std::string_view text, size_t begin) {
  Character c = 0;
  auto at = static_cast<int32_t>(begin);
  U8_NEXT(text, at, static_cast<int32_t>(text.size()), c);
  return c;
}

bool is_apart(std::string_view text, size_t begin, size_t end) {
  return (begin == 0 || !is_word(character_before(text, begin))) && (end == text.size() || !is_word(character_after(text, end)));
}

size_t before_spaces(std::string_view text, size_t end) {
  while (end > 0) {
    const auto c = character_before(text, end);
    if (!is_space(c)) break;
    end -= static_cast<size_t>(U8_LENGTH(c));
  }
  return end;
}

size_t after_spaces(std::string_view text, size_t begin) {
  while (begin < text.size()) {
    const auto c = character_after(text, begin);
    if (!is_space(c)) break;
    begin += static_cast<size_t>(U8_LENGTH(c));
  }
  return begin;
}

} // namespace

void AddedTokens::add(AddedToken token) {
  if (token.content.empty()) return;
  auto& tokens = by_first_byte_[first_byte(token.content)];
  const auto shorter =
      std::find_if(tokens.begin(), tokens.end(), [&](const auto& other) { return other.content.size() < token.content.size(); });
  tokens.insert(shorter, std::move(token));
}

const AddedToken* AddedTokens::find_at(std::string_view text, size_t at) const {
  const auto rest = text.substr(at);
  const auto& tokens = by_first_byte_[first_byte(rest)];
  const auto found =
      std::find_if(tokens.begin(), tokens.end(), [&](const auto& token) { return rest.starts_with(token.content); });
  return found == tokens.end() ? nullptr : &*found;
}

std::vector<AddedTokens::Stretch> AddedTokens::split(std::string_view text) const {
  std::vector<Stretch> stretches;
  size_t done = 0;
  for (size_t at = 0; at < text.size();) {
    const auto* token = find_at(text, at);
    if (token == nullptr) {
      ++at;
      continue;
    }
    auto begin = at, end = at + token->content.size();
    at = end; // the next match begins here, also where this one takes the spaces behind it
    if (token->is_single_word && !is_apart(text, begin, end)) continue;
    if (token->strips_left) begin = std::max(before_spaces(text, begin), done);
    if (token->strips_right) end = after_spaces(text, end);
    if (done < begin) stretches.push_back({text.substr(done, begin - done), std::nullopt});
    stretches.push_back({{}, token->id});
    done = end;
  }
  if (done < text.size()) stretches.push_back({text.substr(done), std::nullopt});
  return stretches;
}

} // namespace tokenize
