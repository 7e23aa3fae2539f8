#pragma once

#include <c10/core/Allocator.h>
#include <tessera/collectives/backends/shared_memory/memory/segment.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

namespace tessera::internal::shared_memory {

/// Memory of this process that the other ranks of its host can read and write where it lies: what is in it goes from rank to rank
/// with one copy. A range of addresses as large as the machine's memory, whose pages exist where a block is in use. Thread-safe;
/// blocks keep it alive.
class Arena : public std::enable_shared_from_this<Arena> {
 public:
  /// Makes the arena of one of `processes` on this host. Throws c10::Error where this process may not have such a range.
  static std::shared_ptr<Arena> create(int processes);

  const Segment& segment() const { return segment_; }
  /// Uninitialized memory; empty where there is none left.
  c10::DataPtr allocate(int64_t bytes);
  /// The offset of `data` in it.
  std::optional<int64_t> find(const void* data) const;

 private:
  struct Block;
  explicit Arena(Segment segment);
  std::optional<int64_t> take(int64_t bytes);
  void give_back(int64_t offset, int64_t bytes) noexcept;

  const Segment segment_;
  std::mutex mutex_;
  std::map<int64_t, int64_t> free_; ///< sizes by offset; neighbours are joined
};

} // namespace tessera::internal::shared_memory
