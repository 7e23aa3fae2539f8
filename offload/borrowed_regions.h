#pragma once

// Internal: regions of files that are in the host's memory for a while.

#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <memory>
#include <vector>

#include <tessera/offload/file_memory.h>

namespace tessera::internal {

/// Storages whose memory is in files, brought to a buffer of the host for as long as something computes with them. The storages
/// stay what they are: their tensors and views are over the buffer meanwhile. In this order: `load`, `attach`, `detach`, `store`,
/// `finish`; the destructor does what is left, but for the store. The files are read and written beside other work.
class BorrowedRegions {
 public:
  using StoragePtr = c10::intrusive_ptr<c10::StorageImpl>;

  BorrowedRegions() = default;
  BorrowedRegions(const BorrowedRegions&) = delete;
  BorrowedRegions& operator=(const BorrowedRegions&) = delete;
  ~BorrowedRegions();

  /// Starts to read `storages`, each of which a region is the memory of, into the buffer, which grows as needed.
  void load(std::vector<StoragePtr> storages);
  /// Waits for that, and puts the storages over the buffer.
  void attach();
  /// Puts them over their files again, whose content may be older.
  void detach();
  /// Starts to write those that `is_written` names, by their numbers.
  void store(const std::vector<bool>& is_written);
  /// Waits for that.
  void finish();

  const std::vector<StoragePtr>& storages() const { return storages_; }

 private:
  char* place(size_t index) const;

  c10::Storage buffer_;
  std::vector<StoragePtr> storages_;
  std::vector<int64_t> offsets_;      ///< of each in the buffer
  std::vector<c10::DataPtr> regions_; ///< of the storages, while these are over the buffer
  std::vector<std::unique_ptr<PendingCopy>> moving_;
};

} // namespace tessera::internal
