#include <tessera/collectives/trace/tick_clock.h>

#include <chrono>
#include <cmath>

namespace tessera::internal {

namespace {

template <typename Clock>
int64_t nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

} // namespace

// Takes several readings, and returns the one that nothing came between.
Moment Moment::now() {
  constexpr int kReadings = 5;
  Moment best;
  Ticks least = 0;
  for (int i = 0; i < kReadings; ++i) {
    const auto before = now_in_ticks();
    const auto steady = nanoseconds<std::chrono::steady_clock>();
    const auto taken = now_in_ticks() - before;
    if (i > 0 && taken >= least) continue;
    least = taken;
    best = {before + taken / 2, steady, nanoseconds<std::chrono::system_clock>()};
  }
  return best;
}

int64_t since_epoch(Ticks ticks, const Moment& first, const Moment& last) {
  const auto span = static_cast<double>(last.ticks - first.ticks);
  const double length = span > 0 ? static_cast<double>(last.steady - first.steady) / span : 1;
  return last.since_epoch - std::llround(static_cast<double>(last.ticks - ticks) * length);
}

} // namespace tessera::internal
