#include <tessera/base/forks.h>

#include <pthread.h>
#include <atomic>
#include <mutex>
#include <vector>

namespace tessera::internal {

namespace {

std::atomic<int> depth{0};

[[maybe_unused]] const int kRegistered = pthread_atfork(nullptr, nullptr, [] { ++depth; });

} // namespace

int fork_depth() noexcept { return depth.load(std::memory_order_relaxed); }

void leave_to_parent(const void* object) {
  static std::mutex mutex;
  static auto& kept = *new std::vector<const void*>; // where leak checkers find them
  std::lock_guard lock(mutex);
  kept.push_back(object);
}

} // namespace tessera::internal
