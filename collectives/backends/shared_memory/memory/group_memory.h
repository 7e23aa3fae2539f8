#pragma once

#include <tessera/collectives/backends/shared_memory/lane.h>
#include <tessera/collectives/backends/shared_memory/memory/segment.h>

#include <atomic>
#include <cstdint>

namespace tessera::internal::shared_memory {

/// How the segment of a group is laid out; the rank that makes it decides.
struct GroupShape {
  int ranks = 0;
  LaneShape all, pair; ///< the lane of all ranks, and those from one rank to another

  /// For ranks that have a core each, or share cores: these switch less often.
  static GroupShape of(int ranks, bool share_cores);
  int64_t reserved_bytes() const; ///< without the lanes of pairs, most of which are never used
  int64_t bytes() const;
};

/// The segment of a group: a bell, what every rank says of itself, and the lanes.
class GroupMemory {
 public:
  GroupMemory(Segment segment, const GroupShape& shape) : segment_(std::move(segment)), shape_(shape) {}

  Bell& bell() const { return *reinterpret_cast<Bell*>(segment_.data()); }
  const GroupShape& shape() const { return shape_; }
  /// `self`: this process's rank.
  Lane lane_of_all(int self) const;
  /// The lane of what `from` sends to `to`: member 0 and member 1. Throws c10::Error where there is no memory for it.
  Lane lane_of_pair(int from, int to, int self) const;

  /// Says that this rank will do nothing more in the group. To be called before its inputs may change or be freed: members that
  /// read them afterwards then see that this one left before they had read its input.
  void leave(int self) const;
  bool has_left(int rank) const { return presence(rank).load() != 0; }

 private:
  std::atomic<uint32_t>& presence(int rank) const;

  Segment segment_;
  GroupShape shape_;
};

} // namespace tessera::internal::shared_memory
