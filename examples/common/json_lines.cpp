#include "common/json_lines.h"

#include <c10/util/Exception.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "common/files.h"

namespace examples {

JsonLines::JsonLines(const std::string& path, bool append) : path_(path) {
  if (!path.empty()) file_ = open_for_writing(path, append);
}

// Flushed line by line: a run that is killed leaves the steps it did.
void JsonLines::write(const nlohmann::ordered_json& record) {
  if (!file_.is_open()) return;
  file_ << record.dump() << std::endl;
  TORCH_CHECK(file_, "cannot write the log ", path_, ": ", std::strerror(errno));
}

} // namespace examples
