#include "common/files.h"

#include <c10/util/Exception.h>

#include <cerrno>
#include <cstring>

namespace examples {

void make_folder_of(const std::filesystem::path& path) {
  std::error_code error;
  if (path.has_parent_path()) std::filesystem::create_directories(path.parent_path(), error);
  TORCH_CHECK(!error, "cannot make the folder of ", path.string(), ": ", error.message());
}

std::ofstream open_for_writing(const std::string& path, bool append) {
  make_folder_of(path);
  std::ofstream file(path, std::ios::binary | (append ? std::ios::app : std::ios::trunc));
  TORCH_CHECK(file, "cannot write ", path, ": ", std::strerror(errno));
  return file;
}

std::string read_file(const std::string& path, const std::string& what, const std::string& hint) {
  TORCH_CHECK(std::filesystem::exists(path), what, " ", path, " does not exist", hint.empty() ? "" : "; ", hint);
  TORCH_CHECK(std::filesystem::is_regular_file(path), what, " ", path, " is no regular file");
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file, "cannot open ", what, " ", path, ": ", std::strerror(errno));
  std::string content(std::filesystem::file_size(path), '\0');
  file.read(content.data(), static_cast<std::streamsize>(content.size()));
  TORCH_CHECK(file.gcount() == static_cast<std::streamsize>(content.size()), "read ", file.gcount(), " of the ", content.size(),
              " bytes of ", what, " ", path);
  return content;
}

} // namespace examples
