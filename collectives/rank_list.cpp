#include <tessera/collectives/rank_list.h>

#include <algorithm>
#include <compare>
#include <mutex>

namespace tessera {

namespace internal {

/// A step of a grid, with the number of list places between two of its ranks.
struct Digit {
  int64_t size, stride, places;
};

} // namespace internal

namespace {

using internal::Digit;
using Steps = RankList::Steps;
constexpr size_t kMostSteps = 8; // a list that needs more is kept as it is

int64_t count_of(const std::vector<Steps>& steps) {
  int64_t count = 1;
  for (const auto& each : steps) count *= each.size;
  return count;
}

int64_t at(int64_t first, const std::vector<Steps>& steps, int64_t index) {
  for (size_t i = steps.size(); i-- > 0; index /= steps[i].size) first += index % steps[i].size * steps[i].stride;
  return first;
}

/// The one form of a grid: neighbouring steps that continue each other are joined, and steps of one rank left out.
std::vector<Steps> joined(const std::vector<Steps>& steps) {
  std::vector<Steps> result;
  for (const auto& each : steps) {
    if (each.size == 1) continue;
    if (!result.empty() && result.back().stride == each.size * each.stride) {
      result.back() = {result.back().size * each.size, each.stride};
    } else {
      result.push_back(each);
    }
  }
  return result;
}

/// The steps of a list that is a grid, innermost found first.
std::optional<std::vector<Steps>> steps_of(const std::vector<int64_t>& ranks) {
  std::vector<Steps> inner_first;
  const auto count = static_cast<int64_t>(ranks.size());
  int64_t done = 1; // the ranks up to here are the grid so far
  while (done < count) {
    if (inner_first.size() == kMostSteps) return std::nullopt;
    const int64_t stride = ranks[static_cast<size_t>(done)] - ranks[0];
    int64_t size = 1;
    while (size * done < count && ranks[static_cast<size_t>(size * done)] == ranks[0] + size * stride) ++size;
    inner_first.push_back({size, stride});
    done *= size;
    if (count % done != 0) return std::nullopt;
  }
  std::vector<Steps> steps(inner_first.rbegin(), inner_first.rend());
  for (int64_t i = 0; i < count; ++i) {
    if (at(ranks[0], steps, i) != ranks[static_cast<size_t>(i)]) return std::nullopt;
  }
  return steps;
}

/// Sorts the steps by falling stride. Nothing unless each rank can be written in one way only, as a number in digits.
std::optional<std::vector<Digit>> digits_of(const std::vector<Steps>& steps) {
  std::vector<Digit> digits;
  int64_t places = 1;
  for (size_t i = steps.size(); i-- > 0; places *= steps[i].size) digits.push_back({steps[i].size, steps[i].stride, places});
  std::sort(digits.begin(), digits.end(), [](const auto& a, const auto& b) { return a.stride < b.stride; });
  int64_t reach = 0;
  for (const auto& digit : digits) {
    if (digit.stride <= reach) return std::nullopt;
    reach += (digit.size - 1) * digit.stride;
  }
  std::reverse(digits.begin(), digits.end());
  return digits;
}

/// `steps` through the places of a grid, as steps through its ranks.
std::optional<std::vector<Steps>> through(const std::vector<Steps>& grid, const std::vector<Steps>& steps) {
  std::vector<Steps> result;
  for (auto [size, stride] : steps) {
    std::vector<Steps> inner_first;
    int64_t places = 1; // between two ranks of the grid's dim
    for (size_t dim = grid.size(); dim-- > 0 && size > 1; places *= grid[dim].size) {
      if (stride >= places * grid[dim].size) continue;
      if (stride % places != 0) return std::nullopt;
      const int64_t every = stride / places;
      if (grid[dim].size % every != 0) return std::nullopt;
      const int64_t taken = std::min(size, grid[dim].size / every);
      if (size % taken != 0) return std::nullopt;
      inner_first.push_back({taken, every * grid[dim].stride});
      size /= taken;
      stride = places * grid[dim].size;
    }
    if (size > 1) return std::nullopt;
    result.insert(result.end(), inner_first.rbegin(), inner_first.rend());
  }
  return result;
}

} // namespace

struct RankList::State {
  int64_t first = 0, count = 0;
  std::vector<Steps> steps;
  std::optional<std::vector<Digit>> digits;
  std::vector<int64_t> irregular;
  struct Expanded {
    std::once_flag once;
    std::vector<int64_t> ranks;
  };
  std::shared_ptr<Expanded> expanded = std::make_shared<Expanded>();
};

RankList::RankList(State state) : state_(std::make_shared<const State>(std::move(state))) {}

RankList RankList::regular(int64_t first, const std::vector<Steps>& steps) {
  State state{.first = first, .count = count_of(steps), .steps = joined(steps)};
  state.digits = digits_of(state.steps);
  return RankList(std::move(state));
}

RankList::RankList(const std::vector<int64_t>& ranks) {
  const auto steps = ranks.empty() ? std::nullopt : steps_of(ranks);
  if (steps) {
    *this = regular(ranks[0], *steps);
  } else {
    state_ = std::make_shared<const State>(State{.count = static_cast<int64_t>(ranks.size()), .irregular = ranks});
  }
}

RankList RankList::first(int64_t count) { return count > 0 ? regular(0, {{count, 1}}) : RankList(); }

int64_t RankList::size() const { return state_->count; }
const std::vector<Steps>& RankList::steps() const { return state_->steps; }
const std::vector<int64_t>& RankList::irregular() const { return state_->irregular; }

int64_t RankList::operator[](int64_t index) const {
  return irregular().empty() ? at(state_->first, steps(), index) : irregular()[static_cast<size_t>(index)];
}

std::optional<int64_t> RankList::index_of(int64_t rank) const {
  if (!state_->digits) {
    const auto& ranks = expanded();
    const auto found = std::find(ranks.begin(), ranks.end(), rank);
    return found == ranks.end() ? std::nullopt : std::optional(found - ranks.begin());
  }
  int64_t rest = rank - state_->first, index = 0;
  for (const auto& digit : *state_->digits) {
    if (rest < 0) return std::nullopt;
    const int64_t value = std::min(rest / digit.stride, digit.size - 1);
    index += value * digit.places;
    rest -= value * digit.stride;
  }
  return rest == 0 ? std::optional(index) : std::nullopt;
}

std::pair<int64_t, int64_t> RankList::range() const {
  if (state_->digits) return {state_->first, (*this)[size() - 1]};
  const auto [low, high] = std::minmax_element(expanded().begin(), expanded().end());
  return {*low, *high};
}

bool RankList::has_repetition() const {
  if (state_->digits) return false;
  auto sorted = expanded();
  std::sort(sorted.begin(), sorted.end());
  return std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end();
}

std::optional<int64_t> RankList::stride() const {
  if (size() == 1) return 1;
  return steps().size() == 1 ? std::optional(steps()[0].stride) : std::nullopt;
}

RankList RankList::select(int64_t first, const std::vector<Steps>& steps) const {
  if (irregular().empty()) {
    if (const auto ranks = through(this->steps(), steps)) return regular((*this)[first], *ranks);
  }
  std::vector<int64_t> ranks(static_cast<size_t>(count_of(steps)));
  for (size_t i = 0; i < ranks.size(); ++i) ranks[i] = (*this)[at(first, steps, static_cast<int64_t>(i))];
  return {ranks};
}

const std::vector<int64_t>& RankList::expanded() const {
  if (!irregular().empty()) return irregular();
  std::call_once(state_->expanded->once, [&] {
    auto& ranks = state_->expanded->ranks;
    for (int64_t i = 0; i < size(); ++i) ranks.push_back((*this)[i]);
  });
  return state_->expanded->ranks;
}

std::strong_ordering operator<=>(const RankList& a, const RankList& b) {
  if (a.state_ == b.state_) return std::strong_ordering::equal;
  if (const auto order = a.size() <=> b.size(); std::is_neq(order)) return order;
  if (const auto order = a.state_->first <=> b.state_->first; std::is_neq(order)) return order;
  if (const auto order = a.steps() <=> b.steps(); std::is_neq(order)) return order;
  return a.irregular() <=> b.irregular();
}

} // namespace tessera
