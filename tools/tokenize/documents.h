#pragma once

#include <cstdint>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

namespace tokenize {

/// What of a text file is a document.
enum class DocumentsBy {
  kFiles, ///< the whole file
  kLines, ///< each line that is not blank
  kJsonl  ///< each line is a JSON object, with the text in a field
};

struct Document {
  std::string text;
  std::string place; ///< for errors: the file, and the line
};

/// Reads documents from files, one after another. Documents without text are left out.
class DocumentReader {
 public:
  DocumentReader(std::vector<std::string> files, DocumentsBy by, std::string field);

  /// The next one; none after the last. Errors name the file and the line.
  std::optional<Document> next();

 private:
  bool open_next();
  std::optional<Document> next_line();

  std::vector<std::string> files_;
  DocumentsBy by_;
  std::string field_;
  size_t opened_ = 0; // files
  std::ifstream file_;
  int64_t line_ = 0;
};

} // namespace tokenize
