#include <tessera/dtensor/rank_values.h>

#include <algorithm>

namespace tessera {

void RankValues::append(int64_t ranks, int64_t value) {
  if (ranks <= 0) return;
  const auto end = static_cast<int64_t>(size()) + ranks;
  if (!runs_.empty() && runs_.back().value == value) {
    runs_.back().end = end;
  } else {
    runs_.push_back({end, value});
  }
}

size_t RankValues::run_of(size_t rank) const {
  const auto after = [](int64_t place, const Run& run) { return place < run.end; };
  return static_cast<size_t>(std::upper_bound(runs_.begin(), runs_.end(), static_cast<int64_t>(rank), after) - runs_.begin());
}

int64_t RankValues::sum_before(size_t rank) const {
  int64_t sum = 0, begin = 0;
  for (const auto& run : runs_) {
    const int64_t end = std::min(run.end, static_cast<int64_t>(rank));
    if (end <= begin) break;
    sum += (end - begin) * run.value;
    begin = run.end;
  }
  return sum;
}

int64_t RankValues::largest() const {
  int64_t value = runs_.empty() ? 0 : runs_[0].value;
  for (const auto& run : runs_) value = std::max(value, run.value);
  return value;
}

} // namespace tessera
