#pragma once

#include <atomic>
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

/// A queue of work that is run in order. Work must not throw.
///
/// Without delays it is run as late as a program can tell: by the thread that waits for it, on the host or of another stream. So
/// no thread is woken for what nobody waits for yet. Work that may block, and that which somebody looks for without waiting, is
/// run by a thread of the stream's own.
class Stream {
 public:
  enum class Start {
    kWhenAwaited,
    kNow ///< on the stream's own thread: it may block, or be seen from outside
  };

  explicit Stream(size_t id) : id_(id) {}

  size_t id() const { return id_; }
  void set_delays(const Delays& delays);

  /// Returns the number of items that were ever pushed.
  uint64_t push(std::function<void()> work, Start start = Start::kWhenAwaited);
  uint64_t pushed() const { return pushed_; }
  /// Whether the first `count` items are done.
  bool has_done(uint64_t count) const { return done_ >= count; }
  /// The same for somebody who asks until they are: they are begun.
  bool query(uint64_t count);
  /// Returns when the first `count` items are done, which it may run itself.
  void wait_for(uint64_t count);

 private:
  struct Item {
    std::function<void()> work;
    Start start;
  };
  enum class Runner { kAnyThread, kOwnThread };

  void run_own_thread();
  void demand(uint64_t count); // the mutex is locked
  void run_until(uint64_t count, Runner runner);
  void run_next(std::unique_lock<std::mutex>& lock);
  int draw_delay_us(); // the mutex is locked

  const size_t id_;
  std::mutex mutex_;
  std::condition_variable wake_, progress_;
  std::deque<Item> items_;
  std::atomic<uint64_t> pushed_{0}, done_{0};
  uint64_t demanded_ = 0; // so many items the own thread runs, if nobody else does
  bool is_running_ = false;
  int waiting_ = 0;
  bool has_thread_ = false;
  Delays delays_;
  bool is_slow_ = false;
  std::mt19937_64 draws_;
};

} // namespace tessera::testing::sim
