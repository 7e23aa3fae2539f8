#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <random>

namespace tessera::testing::sim {

/// How long a stream waits before each of its items: 0 to `max_us` microseconds, drawn with a seed.
struct Delays {
  uint64_t seed = 0;
  int max_us = 0;
  int slow_factor = 1; ///< streams that the seed draws, every second one, are this much slower
};

/// A queue of work that a thread of its own runs in order. Work must not throw.
class Stream {
 public:
  explicit Stream(size_t id) : id_(id) {}

  size_t id() const { return id_; }
  void set_delays(const Delays& delays);

  /// Returns the number of items that were ever pushed.
  uint64_t push(std::function<void()> work);
  uint64_t pushed() const;
  /// Whether the first `count` items are done.
  bool has_done(uint64_t count) const;
  /// Blocks the calling thread until the first `count` items are done.
  void wait_for(uint64_t count) const;

 private:
  void run();
  std::function<void()> take(int& delay_us);

  const size_t id_;
  mutable std::mutex mutex_;
  mutable std::condition_variable wake_, progress_;
  std::deque<std::function<void()>> items_;
  uint64_t pushed_ = 0, done_ = 0;
  bool has_thread_ = false;
  Delays delays_;
  bool is_slow_ = false;
  std::mt19937_64 draws_;
};

} // namespace tessera::testing::sim
