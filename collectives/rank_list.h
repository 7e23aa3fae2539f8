#pragma once

#include <compare>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace tessera {

/// Ranks in an order. A cheap value: copies share one immutable state. The ranks of a regular grid, which are those of nearly all
/// meshes and groups, are kept as a rule, so that 65,536 of them take no more memory than two.
class RankList {
 public:
  /// `size` steps of `stride`.
  struct Steps {
    int64_t size = 1, stride = 1;
    // NOLINTNEXTLINE(modernize-use-nullptr): clang-tidy takes the 0 that it compares with for a pointer
    auto operator<=>(const Steps&) const = default;
  };

  RankList() : RankList(std::vector<int64_t>()) {}
  RankList(const std::vector<int64_t>& ranks);
  RankList(std::initializer_list<int64_t> ranks) : RankList(std::vector<int64_t>(ranks)) {}
  /// 0, 1, …, count - 1.
  static RankList first(int64_t count);

  int64_t size() const;
  int64_t operator[](int64_t index) const;
  /// Where a rank stands in the list, if it does; of a rank that appears twice one of its places.
  std::optional<int64_t> index_of(int64_t rank) const;
  /// The smallest and the largest; not of an empty list.
  std::pair<int64_t, int64_t> range() const;
  bool has_repetition() const;
  /// The step from each rank to the next, where that is the same for all; 1 for a single rank.
  std::optional<int64_t> stride() const;
  /// The ranks at `first` + i × stride, nested, the first steps outermost: a row or a plane of a grid. All of them are inside.
  RankList select(int64_t first, const std::vector<Steps>& steps) const;

  /// All of them, made at the first call and kept.
  const std::vector<int64_t>& expanded() const;

  friend bool operator==(const RankList& a, const RankList& b) { return std::is_eq(a <=> b); }
  friend std::strong_ordering operator<=>(const RankList& a, const RankList& b);
  template <typename H>
  friend H AbslHashValue(H h, const RankList& list) {
    for (const auto& steps : list.steps()) h = H::combine(std::move(h), steps.size, steps.stride);
    return H::combine(std::move(h), list.size(), list.size() > 0 ? list[0] : -1, list.irregular());
  }

 private:
  struct State;
  explicit RankList(State state);
  static RankList regular(int64_t first, const std::vector<Steps>& steps);
  const std::vector<Steps>& steps() const;       ///< outermost first, joined where they can be; of an irregular list none
  const std::vector<int64_t>& irregular() const; ///< the ranks of a list that is no grid

  std::shared_ptr<const State> state_;
};

} // namespace tessera
