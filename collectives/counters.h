#pragma once

#include <array>
#include <atomic>
#include <cstdint>

namespace tessera {

enum class CollectiveKind { kAllGather, kReduceScatter, kAllReduce, kAllToAll, kBroadcast, kBarrier, kSend, kReceive };
inline constexpr int kCollectiveKinds = 8;

/// "all_gather", "reduce_scatter", …
const char* to_string(CollectiveKind kind);

namespace internal {

inline bool reduces(CollectiveKind kind) { return kind == CollectiveKind::kAllReduce || kind == CollectiveKind::kReduceScatter; }

} // namespace internal

/// Calls and payload bytes (the full buffer: the larger of input and output) of each kind of collective.
class CollectiveCounters {
 public:
  struct Count {
    int64_t calls = 0;
    int64_t bytes = 0;
    bool operator==(const Count&) const = default;
  };

  void add(CollectiveKind kind, int64_t bytes);
  Count get(CollectiveKind kind) const;
  void reset();

 private:
  struct Entry {
    std::atomic<int64_t> calls{0};
    std::atomic<int64_t> bytes{0};
  };
  std::array<Entry, kCollectiveKinds> entries_;
};

} // namespace tessera
