#include <tessera/data/tokens/mapped_file.h>

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 // Linux 5.14; glibc names it since 2.35
#endif

namespace tessera::internal {

MappedFile::MappedFile(const std::string& path) : path_(path), fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  TORCH_CHECK(fd_ >= 0, "cannot open ", path, ": ", std::strerror(errno));
  const auto fail = [&](const std::string& cause) {
    ::close(fd_);
    TORCH_CHECK(false, "cannot open ", path, ": ", cause);
  };
  struct stat status {};
  if (::fstat(fd_, &status) != 0) fail(std::strerror(errno));
  if (!S_ISREG(status.st_mode)) fail("not a regular file");
  size_ = status.st_size;
  written_ = status.st_mtim;
  if (size_ == 0) fail("it is empty");
  void* const memory = ::mmap(nullptr, static_cast<size_t>(size_), PROT_READ, MAP_SHARED, fd_, 0);
  if (memory == MAP_FAILED) fail(std::strerror(errno));
  memory_ = static_cast<const std::byte*>(memory);
}

MappedFile::~MappedFile() {
  ::munmap(const_cast<std::byte*>(memory_), static_cast<size_t>(size_)); // NOLINT(cppcoreguidelines-pro-type-const-cast)
  ::close(fd_);
}

void MappedFile::check_unchanged() const {
  struct stat now {};
  TORCH_CHECK(::fstat(fd_, &now) == 0, "cannot read ", path_, ": ", std::strerror(errno));
  TORCH_CHECK(now.st_size == size_, path_, " has changed since it was opened: it had ", size_, " bytes, and now has ",
              now.st_size);
  TORCH_CHECK(now.st_mtim.tv_sec == written_.tv_sec && now.st_mtim.tv_nsec == written_.tv_nsec, path_,
              " has changed since it was opened: something has written to it");
}

// A page that cannot be read ends the process with SIGBUS where it is touched; here it is an error. Older kernels go without.
void MappedFile::bring_to_memory(int64_t offset, size_t bytes) const {
  static const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(memory_ + offset) / page * page; // NOLINT(performance-no-int-to-ptr)
  const auto end = reinterpret_cast<uintptr_t>(memory_ + offset) + bytes;
  int result = 0;
  do result = ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_READ); // NOLINT(performance-no-int-to-ptr)
  while (result != 0 && (errno == EINTR || errno == EAGAIN));
  if (result == 0 || errno == EINVAL) return;
  check_unchanged();
  TORCH_CHECK(false, "cannot read ", bytes, " bytes at byte ", offset, " of ", path_, ": ",
              errno == EFAULT || errno == EHWPOISON ? "the disk reports an error" : std::strerror(errno));
}

void MappedFile::copy(int64_t offset, std::span<std::byte> out) const {
  TORCH_INTERNAL_ASSERT(offset >= 0 && offset + std::ssize(out) <= size_);
  if (out.empty()) return;
  check_unchanged();
  bring_to_memory(offset, out.size());
  std::memcpy(out.data(), memory_ + offset, out.size());
  check_unchanged(); // what was written meanwhile may be half in `out`
}

} // namespace tessera::internal
