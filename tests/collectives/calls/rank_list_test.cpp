#include <tessera/tests/support/matchers.h>

#include <absl/hash/hash.h>
#include <tessera/collectives/rank_list.h>

#include <numeric>
#include <random>

namespace tessera::rank_list_test {
namespace {

using Ranks = std::vector<int64_t>;

/// All that can be asked of a list, beside the plain one.
void expect_same(const RankList& list, const Ranks& ranks) {
  ASSERT_EQ(list.size(), static_cast<int64_t>(ranks.size()));
  EXPECT_EQ(list.expanded(), ranks);
  for (size_t i = 0; i < ranks.size(); ++i) EXPECT_EQ(list[static_cast<int64_t>(i)], ranks[i]);
  for (int64_t rank = -2; rank < 40; ++rank) {
    const auto found = std::find(ranks.begin(), ranks.end(), rank);
    EXPECT_EQ(list.index_of(rank), found == ranks.end() ? std::nullopt : std::optional<int64_t>(found - ranks.begin())) << rank;
  }
  EXPECT_EQ(list.has_repetition(), std::set(ranks.begin(), ranks.end()).size() < ranks.size());
  const auto [low, high] = std::minmax_element(ranks.begin(), ranks.end());
  EXPECT_EQ(list.range(), std::pair(*low, *high));
}

TEST(RankList, IsWhatAPlainListIs) {
  const std::vector<Ranks> lists{{0},
                                 {5},
                                 {0, 1, 2, 3},
                                 {1, 0},
                                 {3, 2, 1, 0},
                                 {0, 2, 4},
                                 {0, 1, 4, 5},
                                 {0, 4, 1, 5},
                                 {2, 6, 3, 7},
                                 {0, 1, 3},
                                 {0, 1, 3, 4, 6},
                                 {7, 7},
                                 {0, 1, 0, 1},
                                 {5, 1, 4, 4},
                                 {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19}};
  for (const auto& ranks : lists) {
    SCOPED_TRACE(c10::str(ranks));
    if (std::set(ranks.begin(), ranks.end()).size() == ranks.size()) expect_same(RankList(ranks), ranks);
    EXPECT_EQ(RankList(ranks).expanded(), ranks);
  }
  EXPECT_EQ(RankList().size(), 0);
  EXPECT_TRUE(RankList().expanded().empty());
  EXPECT_TRUE(RankList({7, 7}).has_repetition());
  EXPECT_TRUE(RankList({0, 1, 0, 1}).has_repetition());
}

TEST(RankList, EqualListsAreEqualHoweverTheyWereMade) {
  const auto grid = RankList::first(24);
  const auto every_third = grid.select(1, {{8, 3}});
  EXPECT_EQ(every_third, RankList({1, 4, 7, 10, 13, 16, 19, 22}));
  EXPECT_EQ(absl::HashOf(every_third), absl::HashOf(RankList({1, 4, 7, 10, 13, 16, 19, 22})));
  EXPECT_EQ(grid.select(0, {{4, 6}, {6, 1}}), grid);
  EXPECT_NE(grid.select(0, {{6, 1}, {4, 6}}), grid);
  EXPECT_NE(grid, RankList::first(23));
  EXPECT_EQ(RankList::first(3).stride(), 1);
  EXPECT_EQ(every_third.stride(), 3);
  EXPECT_EQ(RankList({0, 1, 4, 5}).stride(), std::nullopt);
  EXPECT_EQ(RankList({4}).stride(), 1);
}

TEST(RankList, RandomSelectionsFromGridsAndOthers) {
  std::mt19937 random(1);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  for (int trial = 0; trial < 300; ++trial) {
    const Ranks shape{1 + below(3), 1 + below(4), 1 + below(3)};
    const int64_t count = shape[0] * shape[1] * shape[2];
    Ranks ranks(static_cast<size_t>(count));
    std::iota(ranks.begin(), ranks.end(), below(3));
    if (trial % 3 == 0) std::shuffle(ranks.begin(), ranks.end(), random);
    const Ranks strides{shape[1] * shape[2], shape[2], 1};
    const auto a = static_cast<size_t>(below(3)), b = static_cast<size_t>(below(3));
    std::vector<RankList::Steps> steps{{shape[a], strides[a]}};
    if (a != b) steps.push_back({shape[b], strides[b]});
    Ranks expected;
    for (int64_t i = 0; i < steps[0].size; ++i) {
      for (int64_t j = 0; j < (steps.size() > 1 ? steps[1].size : 1); ++j)
        expected.push_back(ranks[static_cast<size_t>(i * steps[0].stride + (steps.size() > 1 ? j * steps[1].stride : 0))]);
    }
    SCOPED_TRACE(c10::str(ranks, " of shape ", shape, ", dims ", a, " and ", b));
    expect_same(RankList(ranks).select(0, steps), expected);
    EXPECT_EQ(RankList(ranks).select(0, steps), RankList(expected));
  }
}

} // namespace
} // namespace tessera::rank_list_test
