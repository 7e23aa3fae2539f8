#include <c10/util/Exception.h>
#include <unicode/regex.h>
#include <unicode/unistr.h>

#include <array>
#include <cctype>
#include <memory>
#include <string>

#include "pattern.h"

namespace tokenize {

namespace {

// Oniguruma's classes; ICU's own \s lacks two characters, and its \w has others.
constexpr std::string_view kSpace = "\\p{White_Space}", kNoSpace = "\\P{White_Space}";
constexpr std::string_view kWord = "[\\p{Alphabetic}\\p{M}\\p{N}\\p{Pc}]", kNoWord = "[^\\p{Alphabetic}\\p{M}\\p{N}\\p{Pc}]";

/// Writes an expression of Oniguruma as one of ICU.
class Translation {
 public:
  Translation(const std::string& expression, const std::string& where) : from_(expression), where_(where) {}

  std::string result() {
    while (at_ < from_.size()) {
      if (from_[at_] == '\\') {
        escape();
      } else if (from_.compare(at_, 2, "(?") == 0 && depth_ == 0) {
        group();
      } else {
        plain();
      }
    }
    return std::move(to_);
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    TORCH_CHECK_VALUE(false, where_, ": tessera-tokenize does not support ", what, " in the regular expression ", from_);
  }

  void escape() {
    if (at_ + 1 == from_.size()) refuse("a backslash at the end");
    const char c = from_[at_ + 1];
    const auto is_letter_or_digit = std::isalnum(static_cast<unsigned char>(c)) != 0;
    if (is_letter_or_digit && std::string_view("sSwWdDpPnrtfxu").find(c) == std::string_view::npos) {
      refuse(std::string("\\") + c);
    }
    switch (c) {
      case 's': to_ += kSpace; break;
      case 'S': to_ += kNoSpace; break;
      case 'w': to_ += kWord; break;
      case 'W': to_ += kNoWord; break;
      default: to_ += {'\\', c};
    }
    at_ += 2;
  }

  void group() {
    constexpr std::array<std::string_view, 8> kKnown{"(?:", "(?=", "(?!", "(?>", "(?<=", "(?<!", "(?i:", "(?i)"};
    for (const auto& known : kKnown) {
      if (from_.compare(at_, known.size(), known) != 0) continue;
      to_ += known;
      at_ += known.size();
      return;
    }
    refuse("the group " + from_.substr(at_, 4));
  }

  void plain() {
    const char c = from_[at_];
    if (c == '[') {
      if (from_.compare(at_, 2, "[:") == 0) refuse("a POSIX class");
      ++depth_;
    }
    if (c == ']' && depth_ > 0) --depth_;
    const bool ends_counts = c == '}' && depth_ == 0 && at_ + 1 < from_.size() && from_[at_ + 1] == '+';
    if (ends_counts && !ends_property()) refuse("{n,m}+"); // ICU's is possessive, Ruby's is not
    to_ += c;
    ++at_;
  }

  /// Whether the brace at this place ends \p{…}.
  bool ends_property() const {
    const auto begin = from_.rfind('{', at_);
    return begin != std::string::npos && begin >= 2 && from_[begin - 2] == '\\' &&
           (from_[begin - 1] == 'p' || from_[begin - 1] == 'P');
  }

  const std::string& from_;
  const std::string& where_;
  std::string to_;
  size_t at_ = 0;
  int depth_ = 0; // of sets
};

/// How many bytes of UTF-8 these units of UTF-16 are.
size_t bytes_of(const icu::UnicodeString& text, int32_t begin, int32_t end) {
  size_t bytes = 0;
  for (auto at = begin; at < end;) {
    const auto c = text.char32At(at);
    bytes += static_cast<size_t>(U8_LENGTH(c));
    at += U16_LENGTH(c);
  }
  return bytes;
}

std::vector<Stretch> find_matches(const icu::RegexPattern& pattern, std::string_view text) {
  UErrorCode error = U_ZERO_ERROR;
  const auto wide = icu::UnicodeString::fromUTF8(icu::StringPiece(text.data(), static_cast<int32_t>(text.size())));
  const std::unique_ptr<icu::RegexMatcher> matcher(pattern.matcher(wide, error));
  if (U_SUCCESS(error)) matcher->setStackLimit(0, error);
  std::vector<Stretch> stretches;
  int32_t wide_at = 0;
  size_t at = 0;
  const auto add_up_to = [&](int32_t wide_end, bool is_match) {
    if (wide_end == wide_at) return;
    const auto begin = at;
    at += bytes_of(wide, wide_at, wide_end);
    wide_at = wide_end;
    stretches.push_back({begin, at, is_match});
  };
  while (U_SUCCESS(error) && matcher->find(error) != 0) {
    add_up_to(matcher->start(error), false);
    add_up_to(matcher->end(error), true);
  }
  TORCH_CHECK(U_SUCCESS(error), "cannot search a text of ", text.size(), " bytes: ", u_errorName(error));
  add_up_to(wide.length(), false);
  return stretches;
}

} // namespace

Pattern regex_pattern(const std::string& expression, const std::string& where) {
  const auto translated = icu::UnicodeString::fromUTF8(Translation(expression, where).result());
  UErrorCode error = U_ZERO_ERROR;
  UParseError place{};
  // In Ruby's syntax ^ and $ match at every line, and \n alone ends one.
  const std::shared_ptr<const icu::RegexPattern> pattern(
      icu::RegexPattern::compile(translated, UREGEX_MULTILINE | UREGEX_UNIX_LINES, place, error));
  TORCH_CHECK_VALUE(U_SUCCESS(error), where, ": ICU cannot compile the regular expression ", expression, ": ",
                    u_errorName(error));
  return [pattern](std::string_view text) { return find_matches(*pattern, text); };
}

} // namespace tokenize
