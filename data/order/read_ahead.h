#pragma once

// Internal: threads that work ahead of the one that takes their results.

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include <tessera/data/prefetch.h>

namespace tessera::internal {

/// Workers that fill slots 0 … slots - 1 in turn, again and again, each when its result was taken. First a piece of work is
/// drawn, one after the other; then it is done, beside that of other workers. After an error nothing more is drawn.
class ReadAhead {
 public:
  ReadAhead(int64_t slots, int64_t workers, DrawWork draw);
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;
  /// Waits for work that has begun.
  ~ReadAhead();

  /// Waits for the next slot in turn and returns it; throws its error.
  size_t wait();
  /// Frees the slot that `wait` returned last.
  void release();

 private:
  struct Slot {
    bool is_filled = false;
    std::exception_ptr error;
  };

  size_t slot_of(int64_t ticket) const { return static_cast<size_t>(ticket) % slots_.size(); }
  void run();
  std::optional<size_t> next_to_fill();
  void fill(size_t slot, std::exception_ptr error);
  void stop();

  DrawWork draw_;
  std::mutex drawing_; // held from the choice of a slot until its work is drawn
  std::mutex mutex_;   // of all below
  std::condition_variable filled_, freed_;
  std::vector<Slot> slots_;
  int64_t drawn_ = 0, taken_ = 0;
  bool stopped_ = false;
  std::vector<std::thread> threads_;
};

} // namespace tessera::internal
