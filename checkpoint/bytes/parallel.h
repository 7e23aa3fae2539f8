#pragma once

// Internal: reads and writes by several threads.

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace tessera::internal {

/// Calls `work(i)` for every i below `count`, on up to four of the threads that LibTorch uses within an operator: more do not
/// make a disk faster. The first error is thrown when all threads have ended.
template <typename Work>
void for_each_in_parallel(int64_t count, const Work& work) {
  constexpr int64_t kMostThreads = 4;
  std::atomic<int64_t> next{0};
  const auto threads = std::min({static_cast<int64_t>(at::get_num_threads()), kMostThreads, count});
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (auto i = next++; i < count; i = next++) work(i);
  });
}

} // namespace tessera::internal
