#include <tessera/collectives/backends/shared_memory/memory/segment.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace tessera::internal::shared_memory {

namespace {

/// A file that grows beyond this limit ends the process (SIGXFSZ).
void check_file_limit(int64_t bytes) {
  rlimit limit = {};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  TORCH_CHECK(static_cast<rlim_t>(bytes) <= limit.rlim_cur, "a file may have ", limit.rlim_cur,
              " bytes here (ulimit -f), needed are ", bytes);
}

const char* last_error() { return std::strerror(errno); } // NOLINT(concurrency-mt-unsafe): glibc's is safe for known numbers

} // namespace

Segment Segment::create(int64_t bytes, int64_t reserved) {
  check_file_limit(bytes);
  Segment segment;
  segment.descriptor_ = memfd_create("tessera", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  TORCH_CHECK(segment.descriptor_ >= 0, "memfd_create: ", last_error());
  TORCH_CHECK(fchmod(segment.descriptor_, S_IRUSR | S_IWUSR) == 0, "fchmod: ", last_error());
  TORCH_CHECK(ftruncate(segment.descriptor_, bytes) == 0, "ftruncate to ", bytes, " bytes: ", last_error());
  // Of a file that another process cuts, a page that is touched ends this one.
  TORCH_CHECK(fcntl(segment.descriptor_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0, "sealing: ", last_error());
  segment.map(bytes);
  segment.reserve(0, reserved);
  return segment;
}

Segment Segment::open(pid_t process, int descriptor, int64_t bytes) {
  const auto path = c10::str("/proc/", process, "/fd/", descriptor);
  Segment segment;
  segment.descriptor_ = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  TORCH_CHECK(segment.descriptor_ >= 0, "cannot open ", path, ": ", last_error());
  struct stat status = {};
  TORCH_CHECK(fstat(segment.descriptor_, &status) == 0, "fstat of ", path, ": ", last_error());
  TORCH_CHECK(S_ISREG(status.st_mode) && status.st_uid == geteuid() && status.st_size == bytes, path,
              " is no segment of this job: user ", status.st_uid, ", ", status.st_size, " bytes, expected ", bytes);
  segment.map(bytes);
  return segment;
}

void Segment::map(int64_t bytes) {
  void* const mapped = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
  TORCH_CHECK(mapped != MAP_FAILED, "mmap of ", bytes, " bytes: ", last_error());
  data_ = static_cast<char*>(mapped);
  bytes_ = bytes;
}

void Segment::reserve(int64_t offset, int64_t bytes) const {
  constexpr int64_t kPiece = 1 << 20; // older kernels begin anew after a signal, and a profiler's comes every millisecond
  for (const auto end = offset + bytes; offset < end;) {
    const auto piece = std::min(kPiece, end - offset);
    if (fallocate(descriptor_, 0, offset, piece) == 0)
      offset += piece;
    else
      TORCH_CHECK(errno == EINTR, "no ", bytes, " bytes of shared memory: ", last_error());
  }
}

void Segment::release(int64_t offset, int64_t bytes) const noexcept {
  fallocate(descriptor_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes);
}

Segment::~Segment() {
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(bytes_));
  if (descriptor_ >= 0) close(descriptor_);
}

Segment::Segment(Segment&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      descriptor_(std::exchange(other.descriptor_, -1)) {}

Segment& Segment::operator=(Segment&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

} // namespace tessera::internal::shared_memory
