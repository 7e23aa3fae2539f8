#include <c10/util/Exception.h>
#include <fcntl.h>
#include <ftw.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <tessera/base/descriptors.h>
#include <tessera/checkpoint/bytes/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>

namespace tessera::internal {

namespace {

// Linux transfers at most 0x7ffff000 bytes a call.
constexpr size_t kMaxTransfer = size_t{1} << 30;

[[noreturn]] void fail(const char* what, const std::filesystem::path& path, int error) {
  TORCH_CHECK(false, "cannot ", what, " ", path.string(), ": ", std::strerror(error));
}

int open_or_fail(const std::filesystem::path& path, int flags, const char* what) {
  int fd;
  do fd = ::open(path.c_str(), flags | O_CLOEXEC, 0666);
  while (fd < 0 && (errno == EINTR || (errno == EMFILE && gloo::raise_descriptor_limit()))); // a checkpoint may have many files
  if (fd < 0) fail(what, path, errno);
  return fd;
}

// Again where a signal came. Not for ::close, which closes the file in any case.
template <typename Call>
int uninterrupted(const Call& call) {
  int result;
  do result = call();
  while (result != 0 && errno == EINTR);
  return result;
}

} // namespace

File File::open(const std::filesystem::path& path) {
  File file(path, open_or_fail(path, O_RDONLY | O_NONBLOCK, "open"));
  struct stat status {};
  if (::fstat(file.fd_, &status) != 0) fail("read the size of", path, errno);
  TORCH_CHECK(S_ISREG(status.st_mode), "cannot open ", path.string(), ": not a regular file");
  file.size_ = status.st_size;
  return file;
}

File File::create(const std::filesystem::path& path) { return {path, open_or_fail(path, O_WRONLY | O_CREAT | O_EXCL, "create")}; }

File File::open_to_write(const std::filesystem::path& path) { return {path, open_or_fail(path, O_WRONLY, "open")}; }

File::File(File&& other) noexcept
    : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)), size_(std::exchange(other.size_, 0)) {}

File& File::operator=(File&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(fd_, other.fd_);
  std::swap(size_, other.size_);
  return *this;
}

File::~File() {
  if (fd_ >= 0) ::close(fd_);
}

void File::read_at(void* data, size_t bytes, int64_t offset) const {
  auto* out = static_cast<char*>(data);
  while (bytes > 0) {
    const auto got = ::pread(fd_, out, std::min(bytes, kMaxTransfer), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("read", path_, errno);
    TORCH_CHECK(got > 0, "cannot read ", path_.string(), ": it ends at byte ", offset, " where ", bytes, " more were expected");
    out += got;
    offset += got;
    bytes -= static_cast<size_t>(got);
  }
}

void File::write_at(const void* data, size_t bytes, int64_t offset) {
  const auto* in = static_cast<const char*>(data);
  while (bytes > 0) {
    const auto put = ::pwrite(fd_, in, std::min(bytes, kMaxTransfer), offset);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) fail("write", path_, errno);
    in += put;
    offset += put;
    bytes -= static_cast<size_t>(put);
  }
}

void File::start_flush(int64_t offset, int64_t bytes) const {
  // A file system without it flushes everything in the end.
  [[maybe_unused]] const int ignored = ::sync_file_range(fd_, offset, bytes, SYNC_FILE_RANGE_WRITE);
}

void File::reserve(int64_t bytes) {
  const auto reserve = [&] { // returns the error, where others set errno
    errno = ::posix_fallocate(fd_, 0, bytes);
    return errno;
  };
  if (uninterrupted(reserve) != 0) fail("reserve space for", path_, errno);
}

void File::sync_and_close() {
  if (uninterrupted([&] { return ::fsync(fd_); }) != 0) fail("flush", path_, errno);
  if (::close(std::exchange(fd_, -1)) != 0 && errno != EINTR) fail("close", path_, errno);
}

std::string read_file(const std::filesystem::path& path, int64_t limit) { return read_all(File::open(path), limit); }

void write_file(const std::filesystem::path& path, std::string_view text) {
  auto file = File::create(path);
  file.write_at(text.data(), text.size(), 0);
  file.sync_and_close();
}

void sync_folder(const std::filesystem::path& folder) {
  const int fd = open_or_fail(folder, O_RDONLY | O_DIRECTORY, "open");
  const int error = uninterrupted([&] { return ::fsync(fd); }) == 0 ? 0 : errno;
  ::close(fd);
  if (error != 0 && error != EINVAL) fail("flush", folder, error); // EINVAL: a file system without folder sync
}

int remove_tree(const std::filesystem::path& path) {
  constexpr int kOpenFolders = 16;
  const auto remove = [](const char* entry, const struct stat*, int, FTW*) {
    return std::remove(entry) == 0 || errno == ENOENT ? 0 : errno;
  };
  const int result = ::nftw(path.c_str(), remove, kOpenFolders, FTW_DEPTH | FTW_PHYS);
  return result >= 0 ? result : errno == ENOENT ? 0 : errno;
}

void rename_new(const std::filesystem::path& from, const std::filesystem::path& to) {
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) return;
  // A file system without the flag: a plain rename cannot replace a folder that holds anything.
  if (errno == EINVAL && !std::filesystem::exists(to) && ::rename(from.c_str(), to.c_str()) == 0) return;
  fail(("rename " + from.string() + " to").c_str(), to, errno == EINVAL ? EEXIST : errno);
}

void replace_folder(const std::filesystem::path& from, const std::filesystem::path& to) {
  TORCH_CHECK(::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) == 0, "cannot replace ", to.string(),
              " by ", from.string(), ": ", std::strerror(errno));
  remove_tree(from); // the new folder is in place; what is left of the old one is found and removed by the next save
}

void replace_link(const std::filesystem::path& link, const std::filesystem::path& target) {
  // Saves beside each other take turns, so what has the temporary name was left by a killed one. A file system without locks goes
  // without.
  const auto close = [](const int* fd) { ::close(*fd); };
  const int folder = open_or_fail(link.parent_path(), O_RDONLY | O_DIRECTORY, "open");
  const std::unique_ptr<const int, decltype(close)> closes(&folder, close);
  uninterrupted([&] { return ::flock(folder, LOCK_EX); });
  auto temporary = link;
  temporary.replace_filename("." + link.filename().string() + ".new");
  std::filesystem::remove(temporary);
  std::filesystem::create_symlink(target, temporary);
  if (::rename(temporary.c_str(), link.c_str()) != 0) {
    const int error = errno;
    std::filesystem::remove(temporary);
    fail("replace", link, error);
  }
  sync_folder(link.parent_path());
}

} // namespace tessera::internal
