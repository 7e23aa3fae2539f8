#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace tessera::testing::sim {

/// What the device did since the counters were reset.
struct Counters {
  std::map<std::pair<std::string, std::string>, int64_t> launches; ///< by operator and stream
  std::map<std::string, int64_t> synchronizations; ///< in which the host was blocked, by cause: an operator, "stream", …
  int64_t allocations = 0;
  int64_t reused = 0;          ///< allocations that got a block that was freed before
  int64_t allocated_bytes = 0; ///< now
  int64_t peak_bytes = 0;      ///< the most at any time

  int64_t launches_of(const std::string& name) const {
    int64_t sum = 0;
    for (const auto& [key, count] : launches) sum += key.first == name ? count : 0;
    return sum;
  }
  int64_t launches_on(const std::string& stream) const {
    int64_t sum = 0;
    for (const auto& [key, count] : launches) sum += key.second == stream ? count : 0;
    return sum;
  }
  int64_t synchronized() const {
    int64_t sum = 0;
    for (const auto& [cause, count] : synchronizations) sum += count;
    return sum;
  }
};

/// Counters that all threads add to.
class CounterSet {
 public:
  void add_launches(const std::string& name, const std::string& stream, int64_t count) {
    const std::lock_guard lock(mutex_);
    counters_.launches[{name, stream}] += count;
  }
  void add_synchronization(const std::string& cause) {
    const std::lock_guard lock(mutex_);
    ++counters_.synchronizations[cause];
  }
  void add_allocation(int64_t bytes, bool is_reused) {
    const std::lock_guard lock(mutex_);
    ++counters_.allocations;
    counters_.reused += is_reused ? 1 : 0;
    counters_.allocated_bytes += bytes;
    counters_.peak_bytes = std::max(counters_.peak_bytes, counters_.allocated_bytes);
  }
  void add_release(int64_t bytes) {
    const std::lock_guard lock(mutex_);
    counters_.allocated_bytes -= bytes;
  }
  Counters read() const {
    const std::lock_guard lock(mutex_);
    return counters_;
  }
  /// What is allocated now stays, and is the peak from here on.
  void reset() {
    const std::lock_guard lock(mutex_);
    const auto bytes = counters_.allocated_bytes;
    counters_ = {};
    counters_.allocated_bytes = counters_.peak_bytes = bytes;
  }

 private:
  mutable std::mutex mutex_;
  Counters counters_;
};

} // namespace tessera::testing::sim
