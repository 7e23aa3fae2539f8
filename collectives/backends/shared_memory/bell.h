#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace tessera::internal::shared_memory {

/// The threads of all processes sleep here that wait for something in a segment. Zeroed memory is a bell.
///
/// A thread enters, looks once more whether what it waits for is there, sleeps where it is not, and leaves. Who changes something
/// rings afterwards, which costs one load while nobody sleeps. All accesses are sequentially consistent: either the sleeper sees
/// the change when it looks, or the ringer sees that somebody has entered.
class Bell {
 public:
  bool has_listeners() const { return listeners_.load() != 0; }
  void ring();

  /// Returns what `sleep` takes.
  uint32_t enter();
  /// Sleeps until a ring after that `enter`, or for `limit`: then it returns false.
  bool sleep(uint32_t entered, std::chrono::milliseconds limit);
  void leave() { listeners_.fetch_sub(1); }

 private:
  alignas(128) std::atomic<uint32_t> rings_;
  std::atomic<uint32_t> listeners_; // stays too high where a process is killed in its sleep, which costs rings and no more
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

} // namespace tessera::internal::shared_memory
