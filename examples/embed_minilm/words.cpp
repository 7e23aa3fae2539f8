#include "embed_minilm/words.h"

#include <c10/util/Exception.h>
#include <unicode/normalizer2.h>
#include <unicode/uchar.h>
#include <unicode/unistr.h>
#include <unicode/utf8.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

namespace minilm {
namespace {

// The tables of `tokenizers` are those of Unicode 8: it knows no later character, and these six as they were then.
uint32_t category_mask(UChar32 c) {
  switch (c) {
    case 0x166d:
    case 0x111c9: return U_GC_PO_MASK;
    case 0x1734: return U_GC_MN_MASK;
    case 0x1885:
    case 0x1886: return U_GC_LO_MASK;
    case 0xa9bd: return U_GC_MC_MASK;
    default: break;
  }
  std::array<uint8_t, U_MAX_VERSION_LENGTH> age{};
  u_charAge(c, age.data());
  return age[0] > 8 ? U_GC_CN_MASK : U_GET_GC_MASK(c);
}

bool is_space(UChar32 c) { return c == '\t' || c == '\n' || c == '\r' || (U_GET_GC_MASK(c) & U_GC_Z_MASK) != 0; }

bool is_dropped(UChar32 c) {
  return c == 0 || c == 0xfffd || (category_mask(c) & (U_GC_CC_MASK | U_GC_CF_MASK | U_GC_CO_MASK)) != 0;
}

bool is_punctuation(UChar32 c) {
  if (c < 128) return (c > ' ' && c < '0') || (c > '9' && c < 'A') || (c > 'Z' && c < 'a') || (c > 'z' && c < 127);
  return (category_mask(c) & U_GC_P_MASK) != 0;
}

// The blocks that BERT takes for Chinese. As in `tokenizers`, the sixth starts at 2B920, not at 2B820.
bool is_cjk(UChar32 c) {
  constexpr std::array<std::pair<UChar32, UChar32>, 8> kBlocks{{{0x4e00, 0x9fff},
                                                                {0x3400, 0x4dbf},
                                                                {0x20000, 0x2a6df},
                                                                {0x2a700, 0x2b73f},
                                                                {0x2b740, 0x2b81f},
                                                                {0x2b920, 0x2ceaf},
                                                                {0xf900, 0xfaff},
                                                                {0x2f800, 0x2fa1f}}};
  return std::any_of(kBlocks.begin(), kBlocks.end(), [c](const auto& block) { return c >= block.first && c <= block.second; });
}

// Without control characters, with single spaces for white space, and spaces around CJK characters.
icu::UnicodeString clean(std::string_view text) {
  TORCH_CHECK(text.size() <= INT32_MAX, "a text of ", text.size(), " bytes is too long");
  icu::UnicodeString cleaned;
  const auto size = static_cast<int32_t>(text.size());
  for (int32_t at = 0; at < size;) {
    const auto begin = at;
    UChar32 c = 0;
    U8_NEXT(text, at, size, c);
    TORCH_CHECK(c >= 0, "not UTF-8 at byte ", begin);
    if (is_space(c)) {
      cleaned += u' ';
    } else if (is_cjk(c)) {
      cleaned += u' ';
      cleaned += c;
      cleaned += u' ';
    } else if (!is_dropped(c)) {
      cleaned += c;
    }
  }
  return cleaned;
}

// In normal form D: accents are characters of their own.
icu::UnicodeString decompose(const icu::UnicodeString& text) {
  UErrorCode error = U_ZERO_ERROR;
  const auto* form = icu::Normalizer2::getNFDInstance(error);
  auto decomposed = U_SUCCESS(error) ? form->normalize(text, error) : icu::UnicodeString();
  TORCH_CHECK(U_SUCCESS(error), "cannot decompose the text: ", u_errorName(error));
  return decomposed;
}

} // namespace

std::vector<std::string> words_of(std::string_view text) {
  std::vector<std::string> words;
  icu::UnicodeString word;
  const auto end_word = [&] {
    if (!word.isEmpty()) word.toUTF8String(words.emplace_back());
    word.remove();
  };
  const auto decomposed = decompose(clean(text));
  for (int32_t at = 0; at < decomposed.length(); at = decomposed.moveIndex32(at, 1)) {
    const auto accented = decomposed.char32At(at);
    if ((category_mask(accented) & U_GC_MN_MASK) != 0) continue;
    const auto c = u_tolower(accented);
    const bool alone = is_punctuation(c);
    if (alone || is_space(c)) end_word();
    if (!is_space(c)) word += c;
    if (alone) end_word();
  }
  end_word();
  return words;
}

size_t characters_in(std::string_view word) {
  return static_cast<size_t>(std::count_if(word.begin(), word.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

} // namespace minilm
