#pragma once

#include <tessera/collectives/backends/shared_memory/bell.h>
#include <tessera/collectives/calls/signature.h>

#include <atomic>
#include <cstdint>
#include <vector>

namespace tessera::internal::shared_memory {

/// How much memory a lane has. Equal on all its members.
struct LaneShape {
  int members = 0;
  int64_t inline_bytes = 0; ///< the largest payload that travels beside the signature
  int64_t chunk_bytes = 0;  ///< how much of a longer one a member shows at once
  int senders = members;    ///< the first members, which alone contribute anything

  int64_t slot_bytes() const; ///< of a member that sends
  int64_t call_bytes() const; ///< the slots of all members for one call
  int64_t bytes() const;
};

/// How far each member has come. Every counter grows by one at a time.
enum class Counter {
  kPublished, ///< calls that it has made
  kTicks,     ///< steps of staged transfers that it has done its part of
  kFinished,  ///< calls for which it needs nothing of the others any more
};

/// The input of a member, when not in the lane, has its offset in the member's arena, or one of these.
inline constexpr int64_t kNowhere = -1; ///< in memory that the others cannot read
inline constexpr int64_t kNothing = -2; ///< it contributes nothing

/// What the members of a group share, so that they can do one call after another: for each member its counters, a ring of slots
/// (signature, location, counts, small payload), and a ring of chunks. A member writes to its own alone.
///
/// A slot is free for call s when all have finished call s - kSlots. A chunk is free for tick t when all have done tick t - 2,
/// because each reads the chunks of tick t in its tick t + 1 or, in an all-reduce, t + 2.
class Lane {
 public:
  static constexpr uint64_t kSlots = 8, kChunks = 4;

  /// `memory`: `shape.bytes()`, zeroed. `self`: this process's index among the members.
  Lane(char* memory, Bell& bell, const LaneShape& shape, int self);

  int size() const { return shape_.members; }
  int self() const { return self_; }
  const LaneShape& shape() const { return shape_; }

  /// This member's counter; rings when it is the last to come so far.
  void set(Counter counter, uint64_t value);
  uint64_t own(Counter counter) const { return word(self_, counter).load(std::memory_order_relaxed); }
  bool all_have(Counter counter, uint64_t value) const;
  std::vector<int> those_behind(Counter counter, uint64_t value) const; ///< indices of members

  Signature& signature(int member, uint64_t call) const;
  int64_t& location(int member, uint64_t call) const;
  int64_t* counts(int member, uint64_t call) const; ///< 2 × members, for an all_to_all
  char* payload(int member, uint64_t call) const;
  char* chunk(int member, uint64_t tick) const;

 private:
  struct Words;
  std::atomic<uint64_t>& word(int member, Counter counter) const;
  char* slot(int member, uint64_t call) const;

  char* memory_;
  Bell* bell_;
  LaneShape shape_;
  int self_;
};

} // namespace tessera::internal::shared_memory
