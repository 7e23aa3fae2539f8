#include "documents.h"

#include <absl/strings/ascii.h>
#include <c10/util/Exception.h>
#include <tessera/checkpoint/bytes/file.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

namespace tokenize {

namespace {

std::string text_of_json(const std::string& line, const std::string& field, const std::string& place) {
  const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  TORCH_CHECK_VALUE(json.is_object(), place, ": the line is no JSON object");
  TORCH_CHECK_VALUE(json.contains(field) && json[field].is_string(), place, ": the object has no text in the field \"", field,
                    "\"");
  return json[field].get<std::string>();
}

} // namespace

DocumentReader::DocumentReader(std::vector<std::string> files, DocumentsBy by, std::string field)
    : files_(std::move(files)), by_(by), field_(std::move(field)) {}

bool DocumentReader::open_next() {
  if (opened_ == files_.size()) return false;
  const auto& path = files_[opened_++];
  file_ = std::ifstream(path, std::ios::binary);
  TORCH_CHECK(file_, "cannot open ", path, ": ", std::strerror(errno));
  TORCH_CHECK(!std::filesystem::is_directory(path), "cannot open ", path, ": it is a folder");
  line_ = 0;
  return true;
}

std::optional<Document> DocumentReader::next_line() {
  std::string line;
  while (opened_ == 0 || !std::getline(file_, line)) {
    if (opened_ > 0) TORCH_CHECK(!file_.bad(), "cannot read ", files_[opened_ - 1], ": ", std::strerror(errno));
    if (!open_next()) return std::nullopt;
  }
  ++line_;
  if (line.ends_with('\r')) line.pop_back();
  return Document{std::move(line), files_[opened_ - 1] + ":" + std::to_string(line_)};
}

std::optional<Document> DocumentReader::next() {
  if (by_ == DocumentsBy::kFiles) {
    while (opened_ < files_.size()) {
      const auto& path = files_[opened_++];
      auto text = tessera::internal::read_file(path, std::numeric_limits<int32_t>::max());
      if (!text.empty()) return Document{std::move(text), path};
    }
    return std::nullopt;
  }
  while (auto line = next_line()) {
    if (absl::StripAsciiWhitespace(line->text).empty()) continue;
    if (by_ == DocumentsBy::kJsonl) line->text = text_of_json(line->text, field_, line->place);
    if (!line->text.empty()) return line;
  }
  return std::nullopt;
}

} // namespace tokenize
