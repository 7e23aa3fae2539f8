#pragma once

// Internal: a file as memory.

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include <tessera/offload/offload_memory.h>
#include <tessera/offload/transfers.h>

namespace tessera::internal {

class FileMemory;

/// An allocation: whole pages of a file, mapped into memory.
struct FileRegion {
  std::shared_ptr<FileMemory> file;
  int64_t offset, bytes;
  char* mapped;
};

/// The region that is the memory of `storage`; null where that is none.
const FileRegion* file_region(const c10::StorageImpl& storage);

/// Memory in a file without a name, which the system removes when this process lets it go, however it ends. The folder may go
/// before. Blocks are reserved before they are used, so that a full disk is an error and no signal.
///
/// Tensors lie in mappings of the file. `fetch` and `store` go around the page cache where the file system is one that keeps
/// direct I/O and mappings coherent while nobody writes the mapping meanwhile (ext4, XFS: before a transfer they write what was
/// changed through the mapping, and after a write they drop what is cached of it); elsewhere they go through it. A transfer is of
/// whole regions, and the file is one group's: nobody writes it while its tensors are on their way. Thread-safe.
class FileMemory final : public OffloadMemory, public std::enable_shared_from_this<FileMemory> {
 public:
  /// Makes a file. An error names the folder and the rank.
  static std::shared_ptr<FileMemory> create(const std::string& folder);
  FileMemory(const FileMemory&) = delete;
  FileMemory& operator=(const FileMemory&) = delete;
  ~FileMemory() override;

  void reserve(int64_t bytes) override;
  c10::DataPtr allocate(int64_t bytes) override;
  std::unique_ptr<PendingCopy> fetch(const at::Tensor& source, const at::Tensor& destination) override;
  std::unique_ptr<PendingCopy> store(const std::vector<at::Tensor>& sources,
                                     const std::vector<at::Tensor>& destinations) override;

  /// Starts to move the first `bytes` of a region from or to `memory`, which begins at a page; whole pages are moved. An error of
  /// the transfer is thrown by `wait`, and dropped by a destructor, which waits too.
  static std::unique_ptr<PendingCopy> start(const FileRegion& region, Direction direction, char* memory, int64_t bytes);

  /// Copies `sources` to where `destinations` lie in their allocation, of which `buffer` has as many bytes in the host's memory.
  static void fill(const at::Tensor& buffer, const std::vector<at::Tensor>& sources, const std::vector<at::Tensor>& destinations,
                   bool non_blocking);

  /// Whether transfers go around the page cache.
  bool is_direct() const { return is_direct_; }
  int64_t bytes() const;

 private:
  class Moving;
  FileMemory(std::string folder, int fd);
  static void release(void* region);
  friend const FileRegion* file_region(const c10::StorageImpl& storage);
  void grow(int64_t bytes);
  void give_back(int64_t offset, int64_t bytes);
  [[noreturn]] void fail(const std::string& what, int error) const;

  const std::string folder_;
  const int fd_;    // of the mappings
  int transfer_fd_; // the same, where transfers are not direct
  bool is_direct_ = false;
  mutable std::mutex mutex_;
  std::map<int64_t, int64_t> free_; // bytes by offset; neighbours are joined
  int64_t size_ = 0;
};

} // namespace tessera::internal
