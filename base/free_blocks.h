#pragma once

// Internal: which freed block a request for memory gets.

#include <absl/container/btree_map.h>

#include <cstdint>
#include <iterator>
#include <utility>

namespace tessera::internal {

/// Freed blocks by their size in bytes, each with its `Memory`. A prediction of memory follows the same rule without any.
template <typename Memory>
class FreeBlocks {
 public:
  void add(int64_t size, Memory memory) {
    blocks_.emplace(size, std::move(memory));
    bytes_ += size;
  }

  /// The smallest block that fits and is not much larger, with its size. Where there is none, `bytes` without memory, for the
  /// block that the caller will make; then a smaller one is freed, so that blocks do not gather for each size that was ever asked
  /// for.
  std::pair<int64_t, Memory> take(int64_t bytes) {
    const auto found = blocks_.lower_bound(bytes);
    if (found != blocks_.end() && found->first <= kLargest * bytes) return remove(found);
    if (found != blocks_.begin()) remove(std::prev(found));
    return {bytes, Memory()};
  }

  /// Of all blocks together.
  int64_t bytes() const { return bytes_; }

 private:
  using Blocks = absl::btree_multimap<int64_t, Memory>;
  static constexpr int64_t kLargest = 4; // times what is asked for

  std::pair<int64_t, Memory> remove(typename Blocks::iterator block) {
    std::pair<int64_t, Memory> removed(block->first, std::move(block->second));
    blocks_.erase(block);
    bytes_ -= removed.first;
    return removed;
  }

  Blocks blocks_;
  int64_t bytes_ = 0;
};

} // namespace tessera::internal
