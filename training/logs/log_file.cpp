#include <tessera/training/logs/log_file.h>

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <limits>
#include <tuple>
#include <utility>

#include <tessera/checkpoint/bytes/file.h>

namespace tessera::internal {

void make_log_folder(const std::string& folder) {
  if (folder.empty()) return;
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (!error && !std::filesystem::is_directory(folder, error) && !error) error = std::make_error_code(std::errc::not_a_directory);
  TORCH_CHECK(!error, "cannot make the folder ", folder, " of a log: ", error.message());
}

LogFile::LogFile(const std::string& path) : path_(path) {
  make_log_folder(std::filesystem::path(path).parent_path().string());
  do fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  while (fd_ < 0 && errno == EINTR);
  TORCH_CHECK(fd_ >= 0, "cannot open the log ", path, " for writing: ", std::strerror(errno));
}

LogFile::LogFile(LogFile&& other) noexcept : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)) {}

LogFile& LogFile::operator=(LogFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(fd_, other.fd_);
  return *this;
}

LogFile::~LogFile() {
  if (fd_ >= 0) ::close(fd_);
}

bool LogFile::is_regular() const {
  struct stat status {};
  return ::fstat(fd_, &status) == 0 && S_ISREG(status.st_mode);
}

void LogFile::write(std::string_view bytes) {
  while (!bytes.empty()) {
    const auto put = ::write(fd_, bytes.data(), bytes.size());
    if (put < 0 && errno == EINTR) continue;
    TORCH_CHECK(put >= 0, "cannot write the log ", path_, ": ", std::strerror(errno));
    bytes.remove_prefix(static_cast<size_t>(put));
  }
}

void LogFile::append(std::string_view bytes) {
  const auto before = is_regular() ? ::lseek(fd_, 0, SEEK_END) : -1;
  try {
    write(bytes);
  } catch (...) { // a part of it is none
    if (before >= 0) std::ignore = ::ftruncate(fd_, before);
    throw;
  }
}

void LogFile::flush() {
  TORCH_CHECK(!is_regular() || ::fdatasync(fd_) == 0 || errno == EINTR, "cannot flush the log ", path_, ": ",
              std::strerror(errno));
}

std::string LogFile::content() const {
  return is_regular() ? read_file(path_, std::numeric_limits<int64_t>::max()) : std::string();
}

void LogFile::replace(std::string_view kept) {
  if (!is_regular()) return;
  const auto held = content();
  const bool is_beginning = std::string_view(held).starts_with(kept);
  const auto size = is_beginning ? static_cast<off_t>(kept.size()) : 0;
  TORCH_CHECK(held.size() == kept.size() || ::ftruncate(fd_, size) == 0, "cannot cut the log ", path_, ": ",
              std::strerror(errno));
  if (!is_beginning) write(kept);
}

std::string kept_lines(std::string_view text, const std::function<bool(std::string_view, int64_t)>& keep) {
  std::string kept;
  for (int64_t number = 1;; ++number) {
    const auto end = text.find('\n');
    if (end == std::string_view::npos) return kept;
    if (keep(text.substr(0, end), number)) kept += text.substr(0, end + 1);
    text.remove_prefix(end + 1);
  }
}

} // namespace tessera::internal
