#include <tessera/offload/file_memory.h>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <utility>

#include <tessera/base/aligned_memory.h>
#include <tessera/base/tensor_over.h>
#include <tessera/collectives/process_context.h>

namespace tessera::internal {

namespace {

/// A new file without a name, or -1.
int open_unnamed(const std::string& folder) {
  int fd = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | O_EXCL, 0600);
  if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR)) return fd;
  auto name = folder + "/tessera-offload-XXXXXX"; // a file system without O_TMPFILE
  fd = ::mkostemp(name.data(), O_CLOEXEC);
  if (fd >= 0) ::unlink(name.c_str());
  return fd;
}

/// Another descriptor of an open file, for direct I/O; -1 where its file system has none that is coherent with mappings.
int open_directly(int fd) {
  constexpr auto kXfs = 0x58465342;
  struct statfs status {};
  if (::fstatfs(fd, &status) != 0 || (status.f_type != EXT4_SUPER_MAGIC && status.f_type != kXfs)) return -1;
  return ::open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDWR | O_DIRECT | O_CLOEXEC);
}

} // namespace

/// Pages of a region on their way.
class FileMemory::Moving final : public PendingCopy {
 public:
  Moving(std::shared_ptr<const FileMemory> file, const TransferPiece& piece) : file_(std::move(file)), piece_(piece) {
    process_transfers().start({piece}, state_);
  }
  Moving(const Moving&) = delete;
  Moving& operator=(const Moving&) = delete;
  ~Moving() override { process_transfers().wait(state_); }

  void wait() override {
    process_transfers().wait(state_);
    if (const int error = std::exchange(state_.error, 0)) {
      const bool reads = piece_.direction == Direction::kRead;
      file_->fail(c10::str("cannot ", reads ? "read " : "write ", piece_.bytes, " bytes of a file in"), error);
    }
  }

 private:
  std::shared_ptr<const FileMemory> file_;
  TransferPiece piece_;
  TransferState state_;
};

std::shared_ptr<FileMemory> FileMemory::create(const std::string& folder) {
  TORCH_CHECK_VALUE(!folder.empty(), "offload: the folder for files has an empty name, on rank ", rank_for_errors());
  const int fd = open_unnamed(folder);
  TORCH_CHECK(fd >= 0, "offload: cannot make a file in the folder ", folder, " on rank ", rank_for_errors(), ": ",
              std::strerror(errno));
  return std::shared_ptr<FileMemory>(new FileMemory(folder, fd));
}

FileMemory::FileMemory(std::string folder, int fd) : folder_(std::move(folder)), fd_(fd), transfer_fd_(open_directly(fd)) {
  is_direct_ = transfer_fd_ >= 0;
  if (!is_direct_) transfer_fd_ = fd_;
}

FileMemory::~FileMemory() {
  if (is_direct_) ::close(transfer_fd_);
  ::close(fd_);
}

void FileMemory::fail(const std::string& what, int error) const {
  TORCH_CHECK(false, "offload: ", what, " the folder ", folder_, " on rank ", rank_for_errors(), ": ", std::strerror(error));
}

int64_t FileMemory::bytes() const {
  const std::lock_guard lock(mutex_);
  return size_;
}

void FileMemory::grow(int64_t bytes) {
  const int error = ::posix_fallocate(fd_, size_, bytes);
  if (error != 0) {
    [[maybe_unused]] const int ignored = ::ftruncate(fd_, size_); // what was reserved of it goes back to the disk
    fail(c10::str("cannot reserve ", bytes, " bytes in"), error);
  }
  const auto begin = std::exchange(size_, size_ + bytes);
  give_back(begin, bytes);
}

void FileMemory::give_back(int64_t offset, int64_t bytes) {
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && offset + bytes == next->first) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  free_.emplace_hint(next, offset, bytes);
}

void FileMemory::reserve(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  int64_t free = 0;
  for (const auto& [offset, size] : free_) free += size;
  if (free < whole_pages(bytes)) grow(whole_pages(bytes) - free);
}

c10::DataPtr FileMemory::allocate(int64_t bytes) {
  const auto size = whole_pages(std::max<int64_t>(bytes, 1));
  const std::lock_guard lock(mutex_);
  const auto fits = [&](const auto& range) { return range.second >= size; };
  auto found = std::find_if(free_.begin(), free_.end(), fits);
  if (found == free_.end()) {
    grow(size);
    found = std::find_if(free_.begin(), free_.end(), fits);
  }
  const auto offset = found->first;
  void* const mapped = ::mmap(nullptr, static_cast<size_t>(size), PROT_READ | PROT_WRITE, MAP_SHARED, fd_, offset);
  if (mapped == MAP_FAILED) fail(c10::str("cannot map ", size, " bytes of a file in"), errno);
  const auto rest = found->second - size;
  free_.erase(found);
  if (rest > 0) free_.emplace(offset + size, rest);
  auto* region = new FileRegion{shared_from_this(), offset, size, static_cast<char*>(mapped)};
  return {mapped, region, &FileMemory::release, c10::kCPU};
}

void FileMemory::release(void* context) {
  const std::unique_ptr<FileRegion> region(static_cast<FileRegion*>(context));
  ::munmap(region->mapped, static_cast<size_t>(region->bytes));
  const std::lock_guard lock(region->file->mutex_);
  region->file->give_back(region->offset, region->bytes);
}

const FileRegion* file_region(const c10::StorageImpl& storage) {
  const auto& memory = storage.data_ptr();
  return memory.get_deleter() == &FileMemory::release ? static_cast<const FileRegion*>(memory.get_context()) : nullptr;
}

std::unique_ptr<PendingCopy> FileMemory::start(const FileRegion& region, Direction direction, char* memory, int64_t bytes) {
  const auto size = std::min(whole_pages(bytes), region.bytes);
  return std::make_unique<Moving>(region.file, TransferPiece{region.file->transfer_fd_, direction, memory, region.offset, size});
}

std::unique_ptr<PendingCopy> FileMemory::fetch(const at::Tensor& source, const at::Tensor& destination) {
  TORCH_INTERNAL_ASSERT(source.storage_offset() == 0);
  const auto* region = file_region(*source.storage().unsafeGetStorageImpl());
  if (!region) { // it is in the host's memory while an optimizer steps
    const at::NoGradGuard no_grad;
    destination.copy_(source);
    return std::make_unique<FinishedCopy>();
  }
  TORCH_INTERNAL_ASSERT(destination.is_cpu());
  return start(*region, Direction::kRead, static_cast<char*>(destination.mutable_data_ptr()),
               static_cast<int64_t>(source.nbytes()));
}

std::unique_ptr<PendingCopy> FileMemory::store(const std::vector<at::Tensor>& sources,
                                               const std::vector<at::Tensor>& destinations) {
  const auto& storage = destinations.at(0).storage();
  const auto* region = file_region(*storage.unsafeGetStorageImpl());
  TORCH_INTERNAL_ASSERT(region);
  const auto bytes = static_cast<int64_t>(storage.nbytes());
  const auto buffer = tensor_over(aligned_memory(bytes), 0, {bytes}, at::kByte);
  fill(buffer, sources, destinations, /*non_blocking=*/false);
  start(*region, Direction::kWrite, static_cast<char*>(buffer.mutable_data_ptr()), bytes)->wait();
  return nullptr;
}

void FileMemory::fill(const at::Tensor& buffer, const std::vector<at::Tensor>& sources,
                      const std::vector<at::Tensor>& destinations, bool non_blocking) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < sources.size(); ++i) {
    const auto& to = destinations[i];
    const auto offset = buffer.storage_offset() + to.storage_offset() * static_cast<int64_t>(to.element_size());
    tensor_over(buffer.storage(), offset, to.sizes(), to.scalar_type(), {}, to.strides()).copy_(sources[i], non_blocking);
  }
}

} // namespace tessera::internal
