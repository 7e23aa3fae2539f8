#include "embed_minilm/sentences.h"

#include <absl/strings/str_split.h>
#include <absl/strings/strip.h>
#include <c10/util/Exception.h>

#include "common/files.h"

namespace minilm {
namespace {

std::vector<std::string> read_lines(const std::string& path, const char* what) {
  const auto content = examples::read_file(path, what);
  TORCH_CHECK(!content.empty(), what, " ", path, " is empty");
  std::vector<std::string> lines;
  for (const auto line : absl::StrSplit(absl::StripSuffix(content, "\n"), '\n'))
    lines.emplace_back(absl::StripSuffix(line, "\r"));
  return lines;
}

std::vector<int64_t> pieces(std::string_view text, const Tokenize& tokenize, const std::string& path, size_t line) {
  try {
    return tokenize(text);
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, path, ", line ", line, ": ", error.what_without_backtrace());
  }
}

} // namespace

std::vector<Sentence> read_sentences(const std::string& path, const Tokenize& tokenize) {
  std::vector<Sentence> sentences;
  for (auto& line : read_lines(path, "the file of sentences")) {
    auto ids = pieces(line, tokenize, path, sentences.size() + 1);
    sentences.push_back({std::move(line), std::move(ids)});
  }
  return sentences;
}

Pairs read_pairs(const std::string& path, const Tokenize& tokenize) {
  Pairs pairs;
  for (const auto& line : read_lines(path, "the file of pairs")) {
    const auto number = pairs.size() + 1;
    const std::vector<std::string> texts = absl::StrSplit(line, '\t');
    TORCH_CHECK(texts.size() == 2, path, ", line ", number, ": two sentences with one tab between them are needed, but it has ",
                texts.size() - 1, " tabs");
    pairs.first.push_back(pieces(texts[0], tokenize, path, number));
    pairs.second.push_back(pieces(texts[1], tokenize, path, number));
  }
  return pairs;
}

} // namespace minilm
