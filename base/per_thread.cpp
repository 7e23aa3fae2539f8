#include <tessera/base/per_thread.h>

#include <c10/util/Exception.h>

#include <vector>

namespace tessera::internal {

constinit thread_local ThreadTable thread_table{};

namespace {

std::atomic<size_t> places_given = 0;

/// Two threads that are first at once may each take a place, of which one stays unused.
size_t place_of(std::atomic<size_t>& place) {
  auto known = place.load(std::memory_order_relaxed);
  if (known != 0) return known;
  const auto taken = ++places_given;
  TORCH_INTERNAL_ASSERT(taken < ThreadTable::kPlaces, "there are more than ", ThreadTable::kPlaces - 1, " PerThread values");
  return place.compare_exchange_strong(known, taken, std::memory_order_relaxed) ? taken : known;
}

/// Owns what a thread has made, and destroys it when the thread ends, the last first.
class ThreadValues {
 public:
  ThreadValues() = default;
  ~ThreadValues() {
    thread_table.has_ended = true;
    for (; !made_.empty(); made_.pop_back()) {
      auto& [place, value] = made_.back();
      thread_table.values[place] = nullptr;
      value.reset();
    }
  }
  ThreadValues(const ThreadValues&) = delete;
  ThreadValues& operator=(const ThreadValues&) = delete;

  void* add(size_t place, ThreadValue value) {
    made_.emplace_back(place, std::move(value));
    return made_.back().second.get();
  }

 private:
  std::vector<std::pair<size_t, ThreadValue>> made_;
};

ThreadValues& values_of_this_thread() {
  static thread_local ThreadValues values;
  return values;
}

} // namespace

void* make_thread_value(std::atomic<size_t>& place, ThreadValue (*make)()) {
  const auto own = place_of(place);
  auto made = make(); // which may ask for others
  return thread_table.values[own] = thread_table.has_ended ? made.release() : values_of_this_thread().add(own, std::move(made));
}

} // namespace tessera::internal
