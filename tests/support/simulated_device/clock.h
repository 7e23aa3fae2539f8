#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera::testing::sim {

/// A point of a stream: the end of its first `count` items.
struct Position {
  size_t stream = 0;
  uint64_t count = 0;
};

/// A vector clock: how much of each stream is known to be done, whatever the timing.
class Clock {
 public:
  bool covers(const Position& position) const {
    return position.stream < counts_.size() && counts_[position.stream] >= position.count;
  }
  void join(const Position& position) {
    if (counts_.size() <= position.stream) counts_.resize(position.stream + 1);
    counts_[position.stream] = std::max(counts_[position.stream], position.count);
  }
  void join(const Clock& other) {
    for (size_t stream = 0; stream < other.counts_.size(); ++stream) join({stream, other.counts_[stream]});
  }

 private:
  std::vector<uint64_t> counts_; // by stream
};

} // namespace tessera::testing::sim
