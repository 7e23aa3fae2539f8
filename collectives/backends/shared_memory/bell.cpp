#include <tessera/collectives/backends/shared_memory/bell.h>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <cerrno>
#include <climits>
#include <ctime>

namespace tessera::internal::shared_memory {

namespace {

// Not the private kind: the waiters are in several processes.
long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* limit) {
  return syscall(SYS_futex, &word, operation, value, limit, nullptr, 0);
}

} // namespace

void Bell::ring() {
  rings_.fetch_add(1);
  futex(rings_, FUTEX_WAKE, INT_MAX, nullptr);
}

uint32_t Bell::enter() {
  listeners_.fetch_add(1);
  return rings_.load();
}

bool Bell::sleep(uint32_t entered, std::chrono::milliseconds limit) {
  const timespec relative{.tv_sec = limit.count() / 1000, .tv_nsec = limit.count() % 1000 * 1'000'000};
  return futex(rings_, FUTEX_WAIT, entered, &relative) == 0 || errno != ETIMEDOUT;
}

} // namespace tessera::internal::shared_memory
