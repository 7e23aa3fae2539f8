#pragma once

#include <fstream>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace examples {

/// A file of JSON objects, one a line. Numbers have as many digits as it takes to read the same double back.
class JsonLines {
 public:
  /// No file for an empty path. Makes the folder of the file; `append` keeps what the file holds.
  JsonLines(const std::string& path, bool append);

  void write(const nlohmann::ordered_json& record);

 private:
  std::string path_;
  std::ofstream file_;
};

} // namespace examples
