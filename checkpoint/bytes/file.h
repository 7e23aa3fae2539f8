#pragma once

// Internal: files and folders with errors that name the path, the operation and the cause.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include <tessera/checkpoint/bytes/byte_source.h>

namespace tessera::internal {

/// An open file; closed by the destructor.
class File final : public ByteSource {
 public:
  /// Opens a regular file for reading.
  static File open(const std::filesystem::path& path);
  /// Creates a file that does not exist yet, for writing.
  static File create(const std::filesystem::path& path);
  /// Opens an existing file for `write_at`.
  static File open_to_write(const std::filesystem::path& path);

  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  ~File() override;

  const std::filesystem::path& path() const { return path_; }
  std::string name() const override { return path_.string(); }
  int64_t size() const override { return size_; }
  void read_at(void* data, size_t bytes, int64_t offset) const override;
  /// Writes at a place of its own. Safe to call from several threads and processes for ranges that do not overlap.
  void write_at(const void* data, size_t bytes, int64_t offset);
  /// Sets the disk to work on what was written in this range, and returns at once. Errors show in `sync_and_close`.
  void start_flush(int64_t offset, int64_t bytes) const;
  /// Reserves `bytes` on the disk, so that a full one shows now.
  void reserve(int64_t bytes);
  /// Flushes data and metadata to the disk, then closes. The only way to learn of a late write error.
  void sync_and_close();

 private:
  File(std::filesystem::path path, int fd) : path_(std::move(path)), fd_(fd) {}

  std::filesystem::path path_;
  int fd_ = -1;
  int64_t size_ = 0;
};

/// Reads a whole file of at most `limit` bytes.
std::string read_file(const std::filesystem::path& path, int64_t limit);

/// Writes `text` as a file that does not exist yet, and flushes it to the disk.
void write_file(const std::filesystem::path& path, std::string_view text);

/// Flushes a folder's entries to the disk.
void sync_folder(const std::filesystem::path& folder);

/// Removes a file, or a folder with all in it; nothing where there is none. Returns an errno where that fails, and then leaves
/// the rest. Not std::filesystem::remove_all: the wheel's libtorch.so exports one that calls null, and a program that links it
/// first runs that one.
int remove_tree(const std::filesystem::path& path);

/// Renames `from` to `to`, which must not exist.
void rename_new(const std::filesystem::path& from, const std::filesystem::path& to);

/// Puts the folder `from` in the place of the existing folder `to`, and removes the old one.
void replace_folder(const std::filesystem::path& from, const std::filesystem::path& to);

/// Makes `link` a symbolic link to `target`, in place of an older link, in one step.
void replace_link(const std::filesystem::path& link, const std::filesystem::path& target);

} // namespace tessera::internal
