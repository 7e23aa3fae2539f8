#include "normalizers.h"

#include <c10/util/Exception.h>
#include <unicode/bytestream.h>
#include <unicode/normalizer2.h>

#include <utility>
#include <vector>

#include "characters.h"
#include "part.h"

namespace tokenize {

namespace {

using Form = const icu::Normalizer2* (*)(UErrorCode&);

Normalizer unicode_form(Form form) {
  UErrorCode error = U_ZERO_ERROR;
  const auto* instance = form(error);
  TORCH_CHECK(U_SUCCESS(error), "ICU has no data for a normal form of Unicode: ", u_errorName(error));
  return [instance](const std::string& text) {
    UErrorCode status = U_ZERO_ERROR;
    std::string normalized;
    icu::StringByteSink<std::string> sink(&normalized);
    instance->normalizeUTF8(0, text, sink, nullptr, status);
    TORCH_CHECK(U_SUCCESS(status), "cannot normalize a text of ", text.size(), " bytes: ", u_errorName(status));
    return normalized;
  };
}

template <typename Rewrite>
std::string rewritten(const std::string& text, const Rewrite& rewrite) {
  std::string result;
  result.reserve(text.size());
  for_each_character(text, [&](Character c) { rewrite(result, c); });
  return result;
}

std::string lower(const std::string& text) { return rewritten(text, append_lower); }

std::string without_combining_marks(const std::string& text) {
  return rewritten(text, [](std::string& out, Character c) {
    if (!is_combining_mark(c)) append(out, c);
  });
}

std::string clean(const std::string& text) {
  return rewritten(text, [](std::string& out, Character c) {
    if (c != 0 && c != 0xfffd && !is_bert_control(c)) append(out, is_space(c) ? ' ' : c);
  });
}

std::string with_spaces_around_chinese(const std::string& text) {
  return rewritten(text, [](std::string& out, Character c) {
    const bool is_chinese = is_bert_chinese(c);
    if (is_chinese) out += ' ';
    append(out, c);
    if (is_chinese) out += ' ';
  });
}

std::string without_bert_accents(const std::string& text) {
  return rewritten(text, [](std::string& out, Character c) {
    if (!is_bert_accent(c)) append(out, c);
  });
}

Normalizer rewrites_in_turn(std::vector<Normalizer> steps) {
  return [steps = std::move(steps)](std::string text) {
    for (const auto& step : steps) text = step(std::move(text));
    return text;
  };
}

Normalizer bert_normalizer(const Part& part) {
  part.allow({"clean_text", "handle_chinese_chars", "strip_accents", "lowercase"});
  const bool lowers = part.boolean("lowercase", true);
  std::vector<Normalizer> steps;
  if (part.boolean("clean_text", true)) steps.emplace_back(clean);
  if (part.boolean("handle_chinese_chars", true)) steps.emplace_back(with_spaces_around_chinese);
  if (part.boolean("strip_accents", lowers)) {
    steps.push_back(unicode_form(icu::Normalizer2::getNFDInstance));
    steps.emplace_back(without_bert_accents);
  }
  if (lowers) steps.emplace_back(lower);
  return rewrites_in_turn(std::move(steps));
}

Normalizer normalizer_sequence(const Part& part) {
  part.allow({"normalizers"});
  std::vector<Normalizer> steps;
  for (const auto& each : part.json()["normalizers"].elements()) steps.push_back(read_normalizer(each));
  return rewrites_in_turn(std::move(steps));
}

/// One without settings; none for another type.
Normalizer read_plain_normalizer(const std::string& type) {
  if (type == "NFC") return unicode_form(icu::Normalizer2::getNFCInstance);
  if (type == "NFD") return unicode_form(icu::Normalizer2::getNFDInstance);
  if (type == "NFKC") return unicode_form(icu::Normalizer2::getNFKCInstance);
  if (type == "NFKD") return unicode_form(icu::Normalizer2::getNFKDInstance);
  if (type == "Lowercase") return lower;
  if (type == "StripAccents") return without_combining_marks;
  return nullptr;
}

} // namespace

Normalizer read_normalizer(const tessera::internal::JsonView& json) {
  if (json.json().is_null()) return rewrites_in_turn({});
  const Part part(json);
  const auto& type = part.type();
  if (type == "Sequence") return normalizer_sequence(part);
  if (type == "BertNormalizer") return bert_normalizer(part);
  auto rewrite = read_plain_normalizer(type);
  if (!rewrite) part.refuse("the normalizer " + type);
  part.allow({});
  return rewrite;
}

} // namespace tokenize
