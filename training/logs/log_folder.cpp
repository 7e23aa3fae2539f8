#include <tessera/training/logs/log_folder.h>

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include <tessera/training/logs/log_file.h>

namespace tessera::internal {

std::vector<std::string> files_of_log(const std::string& folder, std::string_view ending) {
  make_log_folder(folder);
  TORCH_CHECK(::faccessat(AT_FDCWD, folder.c_str(), W_OK | X_OK, AT_EACCESS) == 0, "cannot write to the folder ", folder,
              " of a log: ", std::strerror(errno));
  std::vector<std::string> paths;
  std::error_code error;
  for (std::filesystem::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    if (it->path().filename().string().ends_with(ending)) paths.push_back(it->path().string());
  }
  TORCH_CHECK(!error, "cannot read the folder ", folder, " of a log: ", error.message());
  std::sort(paths.begin(), paths.end());
  return paths;
}

void remove_log_file(const std::string& path) {
  TORCH_CHECK(::unlink(path.c_str()) == 0 || errno == ENOENT, "cannot remove the old log ", path, ": ", std::strerror(errno));
}

} // namespace tessera::internal
