#pragma once

// Internal: a file in memory that may change or break while it is read.

#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace tessera::internal {

/// A file that is mapped for reading, as it was when it was opened.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }

  /// Copies `out.size()` bytes at `offset`. Errors that name the file: it has been written or cut since it was opened, the disk
  /// cannot read it. Safe to call from several threads.
  void copy(int64_t offset, std::span<std::byte> out) const;

 private:
  void check_unchanged() const;
  void bring_to_memory(int64_t offset, size_t bytes) const;

  std::string path_;
  int fd_ = -1;
  int64_t size_ = 0;
  timespec written_{};
  const std::byte* memory_ = nullptr;
};

} // namespace tessera::internal
