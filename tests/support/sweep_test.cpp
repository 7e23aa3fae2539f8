#include "sweep.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "line_mesh.h"
#include "matchers.h"
#include "scoped_environment.h"
#include "world.h"

namespace tessera::testing::sweep_test {
namespace {

using Numbers = std::vector<int64_t>;

Numbers first_numbers(int64_t count) {
  Numbers numbers(static_cast<size_t>(count));
  std::iota(numbers.begin(), numbers.end(), int64_t{0});
  return numbers;
}

class Sweep : public ::testing::Test {
 protected:
  ScopedEnvironment drawn_{"TESSERA_TEST_FULL", "0"}, seed_{"TESSERA_TEST_SEED", "1"};
};

TEST_F(Sweep, CallsOfATestDrawOtherMembersInTheirOrder) {
  std::set<Numbers> draws;
  for (int call = 0; call < 20; ++call) {
    const auto draw = sweep(first_numbers(16), 3);
    EXPECT_EQ(draw.size(), 3U);
    EXPECT_TRUE(std::is_sorted(draw.begin(), draw.end()));
    draws.insert(draw);
  }
  EXPECT_GT(draws.size(), 15U) << "of 560";
}

TEST_F(Sweep, EveryMemberIsReachedOverSeeds) {
  std::set<int64_t> reached;
  for (int seed = 1; seed <= 40; ++seed) {
    const ScopedEnvironment other("TESSERA_TEST_SEED", std::to_string(seed).c_str());
    for (const auto number : sweep(first_numbers(16), 3)) reached.insert(number);
  }
  EXPECT_EQ(reached.size(), 16U);
}

TEST_F(Sweep, SomeAreAlwaysTakenAndCountAmongTheOthers) {
  for (int call = 0; call < 20; ++call) {
    const auto draw = sweep(first_numbers(16), 3, [](int64_t number) { return number == 9; });
    EXPECT_EQ(draw.size(), 3U);
    EXPECT_THAT(draw, ::testing::Contains(9).Times(1));
    EXPECT_TRUE(std::is_sorted(draw.begin(), draw.end()));
  }
  EXPECT_THAT(sweep(first_numbers(5), 1, [](int64_t number) { return number > 2; }), ::testing::ElementsAre(3, 4));
  EXPECT_EQ(sweep(first_numbers(5), 9), first_numbers(5));
  EXPECT_EQ(sweep(Numbers(), 2), Numbers());
}

TEST_F(Sweep, AFullRunTakesAll) {
  const ScopedEnvironment full("TESSERA_TEST_FULL", "1");
  EXPECT_EQ(sweep(first_numbers(16), 3), first_numbers(16));
}

/// What the first call of a test draws: the two tests below compare theirs.
std::vector<Numbers>& first_draws() {
  static std::vector<Numbers> draws;
  return draws;
}

TEST_F(Sweep, TwoTestsDrawOtherMembersOfOneListA) { first_draws().push_back(sweep(first_numbers(1000), 10)); }

TEST_F(Sweep, TwoTestsDrawOtherMembersOfOneListB) {
  first_draws().push_back(sweep(first_numbers(1000), 10));
  if (first_draws().size() == 2) EXPECT_NE(first_draws()[0], first_draws()[1]);
}

TEST_F(Sweep, RanksDrawTheSame) {
  const auto own = torch::tensor(sweep(first_numbers(1000), 10));
  auto sum = own.clone();
  line_mesh().communicator(0)->all_reduce(sum, ReduceOp::kSum, "draws").wait();
  EXPECT_TENSORS_EQUAL(sum, own * world_size());
}

} // namespace
} // namespace tessera::testing::sweep_test
