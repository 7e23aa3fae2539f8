#include <tessera/tests/support/matchers.h>

#include <absl/hash/hash.h>
#include <tessera/dtensor/rank_values.h>

#include <numeric>
#include <random>

namespace tessera::rank_values_test {
namespace {

TEST(RankValues, IsWhatAPlainListIs) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 100; ++trial) {
    std::vector<int64_t> plain(random() % 12);
    for (auto& value : plain) value = static_cast<int64_t>(random() % 3);
    const RankValues values(plain);
    ASSERT_EQ(values.size(), plain.size());
    EXPECT_EQ(values.empty(), plain.empty());
    EXPECT_EQ(std::vector<int64_t>(values.begin(), values.end()), plain);
    for (size_t i = 0; i <= plain.size(); ++i) {
      if (i < plain.size()) EXPECT_EQ(values[i], plain[i]);
      EXPECT_EQ(values.sum_before(i), std::accumulate(plain.begin(), plain.begin() + static_cast<int64_t>(i), int64_t{0}));
    }
    if (plain.empty()) continue;
    EXPECT_EQ(values.back(), plain.back());
    EXPECT_EQ(values.largest(), *std::max_element(plain.begin(), plain.end()));
    auto other = plain;
    other.back() += 1;
    EXPECT_NE(values, RankValues(other));
    EXPECT_EQ(absl::HashOf(values), absl::HashOf(RankValues(plain)));
  }
}

TEST(RankValues, ManyRanksAreAFewRuns) {
  RankValues values;
  values.append(1000, 0);
  values.append(1, 5);
  values.append(0, 9);
  values.append(60000, 7);
  values.append(4535, 7);
  EXPECT_EQ(values.size(), 65536u);
  EXPECT_EQ(values.runs().size(), 3u);
  EXPECT_EQ(values.sum_before(1002), 12);
  EXPECT_EQ(values[65535], 7);
  EXPECT_EQ(values, (RankValues(values.begin(), values.end())));
}

} // namespace
} // namespace tessera::rank_values_test
