#include <tessera/plan/search/limits.h>

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace tessera::internal {

namespace {

/// The fastest of `found` that recomputes, or does not.
std::optional<Prediction> fastest_with(const std::vector<Prediction>& found, bool recompute) {
  const auto one =
      std::find_if(found.begin(), found.end(), [&](const auto& each) { return each.settings.recompute == recompute; });
  return one == found.end() ? std::nullopt : std::optional(*one);
}

/// `find` searches for the fastest with the limit.
template <typename Find> // std::optional<Prediction>()
PlanLimit limit_of(Search& search, const std::string& what, const Prediction& best, const Find& find) {
  const auto left_out = search.left_out();
  PlanLimit limit{.what = what, .plan = find()};
  limit.is_complete = search.left_out() == left_out;
  if (!limit.plan) return limit;
  limit.memory = limit.plan->peak();
  limit.speed = limit.plan->rows_per_second() / best.rows_per_second();
  return limit;
}

} // namespace

std::vector<PlanLimit> limits_of(Search& search, const Prediction& best, int64_t budget) {
  std::vector<PlanLimit> limits;
  const bool recomputes = best.settings.recompute;
  auto others = search.candidates();
  std::erase_if(others, [&](const auto& each) { return each.settings.recompute == recomputes; });
  if (!others.empty()) {
    limits.push_back(limit_of(search, recomputes ? "without recomputation" : "with recomputation", best,
                              [&] { return fastest_with(search.fitting(budget, others), !recomputes); }));
  }
  for (const auto& [factor, name] :
       {std::pair(0.5, "half of the memory"), std::pair(1.5, "1.5 x the memory"), std::pair(2.0, "2 x the memory")}) {
    const auto bytes = static_cast<int64_t>(factor * static_cast<double>(budget));
    limits.push_back(limit_of(search, name, best, [&] {
      const auto found = search.fitting(bytes, search.candidates());
      return found.empty() ? std::nullopt : std::optional(found.front());
    }));
  }
  return limits;
}

} // namespace tessera::internal
