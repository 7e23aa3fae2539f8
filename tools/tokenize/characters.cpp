#include "characters.h"

#include <unicode/uchar.h>

#include <algorithm>
#include <array>
#include <utility>

namespace tokenize {

namespace {

bool is_since(Character c, int version) {
  std::array<uint8_t, U_MAX_VERSION_LENGTH> age{};
  u_charAge(c, age.data());
  return age[0] >= version;
}

// The categories of Unicode 8: these characters have others today.
uint32_t category_of_unicode_8(Character c) {
  switch (c) {
    case 0x166d:
    case 0x111c9: return U_GC_PO_MASK;
    case 0x1734: return U_GC_MN_MASK;
    case 0x1885:
    case 0x1886: return U_GC_LO_MASK;
    case 0xa9bd: return U_GC_MC_MASK;
    default: return is_since(c, 9) ? U_GC_CN_MASK : U_GET_GC_MASK(c);
  }
}

} // namespace

int64_t find_malformed(std::string_view text) {
  const auto size = static_cast<int32_t>(text.size());
  for (int32_t at = 0; at < size;) {
    const auto begin = at;
    Character c = 0;
    U8_NEXT(text, at, size, c);
    if (c < 0) return begin;
  }
  return -1;
}

void append(std::string& text, Character c) {
  std::array<char, U8_MAX_LENGTH> bytes{};
  int32_t size = 0;
  U8_APPEND_UNSAFE(bytes, size, c);
  text.append(bytes.data(), static_cast<size_t>(size));
}

size_t count_characters(std::string_view text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) { return !U8_IS_TRAIL(c); }));
}

bool is_space(Character c) { return u_isUWhiteSpace(c) != 0; }

bool is_word(Character c) {
  return (U_GET_GC_MASK(c) & (U_GC_M_MASK | U_GC_ND_MASK | U_GC_PC_MASK)) != 0 || u_hasBinaryProperty(c, UCHAR_ALPHABETIC) != 0 ||
         u_hasBinaryProperty(c, UCHAR_JOIN_CONTROL) != 0;
}

bool is_ascii_punctuation(Character c) {
  return (c >= '!' && c <= '/') || (c >= ':' && c <= '@') || (c >= '[' && c <= '`') || (c >= '{' && c <= '~');
}

void append_lower(std::string& text, Character c) {
  append(text, u_tolower(c));
  if (c == 0x130) append(text, 0x307); // the only one whose lower case is two characters wherever it stands
}

bool is_bert_control(Character c) {
  return c != '\t' && c != '\n' && c != '\r' && (category_of_unicode_8(c) & (U_GC_CC_MASK | U_GC_CF_MASK | U_GC_CO_MASK)) != 0;
}

bool is_bert_accent(Character c) { return (category_of_unicode_8(c) & U_GC_MN_MASK) != 0; }

bool is_bert_punctuation(Character c) { return is_ascii_punctuation(c) || (category_of_unicode_8(c) & U_GC_P_MASK) != 0; }

bool is_combining_mark(Character c) {
  if (c == 0x1cf2 || c == 0x1cf3) return true; // as in Unicode 9
  if (c == 0x111c9 || is_since(c, 10)) return false;
  return (U_GET_GC_MASK(c) & U_GC_M_MASK) != 0;
}

// As in `tokenizers`, the fifth starts at 2B920, not at 2B820.
bool is_bert_chinese(Character c) {
  constexpr std::array<std::pair<Character, Character>, 7> kBlocks{{{0x4e00, 0x9fff},
                                                                    {0x3400, 0x4dbf},
                                                                    {0x20000, 0x2a6df},
                                                                    {0x2a700, 0x2b81f},
                                                                    {0x2b920, 0x2ceaf},
                                                                    {0xf900, 0xfaff},
                                                                    {0x2f800, 0x2fa1f}}};
  return std::any_of(kBlocks.begin(), kBlocks.end(), [c](const auto& block) { return c >= block.first && c <= block.second; });
}

} // namespace tokenize
