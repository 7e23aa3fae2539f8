#include <tessera/dtensor/layout/sharding_math.h>
#include <tessera/dtensor/placement.h>

#include <numeric>

#include <tessera/tests/dtensor/layouts.h>

namespace tessera::testing::placement_test {
namespace {

using Extents = std::vector<internal::Extent>;

std::vector<Placement> every_kind() {
  std::vector<Placement> result{Replicate{},       Shard{0}, Shard{-2}, StridedShard{1, 4}, RaggedShard{0, {3, 0, 2}},
                                RaggedShard{2, {}}};
  for (const auto& partial : partials()) result.push_back(partial);
  result.emplace_back(Partial{Partial::Op::kNorm, 1.5});
  return result;
}

TEST(Placement, IsPrintedAndParsed) {
  EXPECT_EQ(to_string(Placement(StridedShard{1, 4})), "StridedShard(1, 4)");
  EXPECT_EQ(to_string(Placement(RaggedShard{0, {3, 0, 2}})), "RaggedShard(0, [3, 0, 2])");
  EXPECT_EQ(to_string(Placement(Partial{Partial::Op::kNorm, 1.5})), "Partial(norm 1.5)");
  EXPECT_EQ(to_string(Placement(Partial{Partial::Op::kMask})), "MaskPartial()");
  Placements all;
  for (const auto& placement : every_kind()) {
    EXPECT_EQ(parse_placement(to_string(placement)), placement);
    all.push_back(placement);
  }
  EXPECT_EQ(parse_placements(to_string(all)), all);
  EXPECT_EQ(parse_placements(" ( Shard( 1 ) ,Partial(avg ) ) "), (Placements{Shard{1}, Partial{Partial::Op::kAvg}}));
  EXPECT_EQ(parse_placements("()"), Placements{});
}

TEST(Placement, ATextThatIsNoneIsAnError) {
  EXPECT_THROWS_WITH(
      parse_placement("Split(0)"),
      "not a placement: 'Split(0)': Replicate, Shard, StridedShard, RaggedShard, Partial or MaskPartial is expected");
  EXPECT_THROWS_WITH(parse_placement("Shard(0"), "')' is expected at position 7");
  EXPECT_THROWS_WITH(parse_placement("Shard(x)"), "an integer is expected at position 6");
  EXPECT_THROWS_WITH(parse_placement("Shard(99999999999999999999)"), "an integer is expected at position 6");
  EXPECT_THROWS_WITH(parse_placement("Shard(0) Shard(1)"), "the end is expected at position 9");
  EXPECT_THROWS_WITH(parse_placement("Partial(mean)"), "sum, avg, min, max, product or norm is expected at position 8");
  EXPECT_THROWS_WITH(parse_placement("Partial(norm)"), "the p of the norm is expected at position 12");
  EXPECT_THROWS_WITH(parse_placement("MaskPartial(sum)"), "')' is expected at position 12");
  EXPECT_THROWS_WITH(parse_placement("RaggedShard(0, [1, )"), "an integer is expected at position 19");
  EXPECT_THROWS_WITH(parse_placements("Shard(0)"), "'(' is expected at position 0");
  EXPECT_THROWS_WITH(parse_placement(""), "is expected at position 0");
}

TEST(Placement, IsEqualAndHashedByValue) {
  const auto placements = every_kind();
  for (size_t i = 0; i < placements.size(); ++i) {
    const auto again = every_kind()[i];
    EXPECT_EQ(hash_value(placements[i]), hash_value(again));
    for (size_t j = 0; j < placements.size(); ++j) {
      EXPECT_EQ(placements[i] == placements[j], i == j);
      EXPECT_EQ(hash_value(placements[i]) == hash_value(placements[j]), i == j);
    }
  }
}

TEST(StridedShard, HoldsOnePartOfEveryChunk) {
  EXPECT_EQ(internal::strided_extents(8, 2, 2, 0), (Extents{{0, 2}, {4, 2}}));
  EXPECT_EQ(internal::strided_extents(8, 2, 2, 1), (Extents{{2, 2}, {6, 2}}));
  EXPECT_EQ(internal::strided_extents(8, 1, 2, 1), (Extents{{4, 4}}));
  EXPECT_EQ(internal::strided_extents(5, 2, 2, 1), (Extents{{2, 1}, {4, 1}}));
  EXPECT_EQ(internal::strided_extents(3, 4, 2, 0), (Extents{{0, 3}}));
  EXPECT_EQ(internal::strided_extents(3, 4, 2, 1), Extents{});
  EXPECT_EQ(internal::strided_extents(0, 2, 2, 0), Extents{});
}

/// An inner mesh dim that split first is an outer StridedShard: FSDP2 over tensor parallelism.
TEST(StridedShard, BesideAShardIsASplitFromRightToLeft) {
  const Placements placements{StridedShard{0, 2}, Shard{0}};
  for (int64_t data = 0; data < 2; ++data) {
    for (int64_t tensor = 0; tensor < 2; ++tensor) {
      const auto held = internal::dim_extents(8, {2, 2}, {data, tensor}, placements, 0);
      EXPECT_EQ(held, (Extents{{tensor * 4 + data * 2, 2}}));
      const auto box = internal::local_box({8, 3}, {2, 2}, {data, tensor}, placements);
      EXPECT_EQ(box.sizes, (std::vector<int64_t>{2, 3}));
      EXPECT_EQ(box.offsets, (std::vector<int64_t>{tensor * 4 + data * 2, 0}));
    }
  }
}

TEST(StridedShard, EveryPositionIsHeldOnce) {
  for (int64_t size = 0; size < 20; ++size) {
    for (int64_t factor = 1; factor < 5; ++factor) {
      for (int64_t ranks = 1; ranks < 5; ++ranks) {
        std::vector<int> held(size, 0);
        for (int64_t outer = 0; outer < ranks; ++outer) {
          for (int64_t inner = 0; inner < 3; ++inner) {
            const auto extents = internal::dim_extents(size, {ranks, 3}, {outer, inner}, {StridedShard{0, factor}, Shard{0}}, 0);
            for (const auto& part : extents) {
              for (int64_t i = 0; i < part.size; ++i) ++held[part.offset + i];
            }
          }
        }
        EXPECT_EQ(held, std::vector<int>(size, 1)) << size << " by " << factor << " over " << ranks;
      }
    }
  }
}

} // namespace
} // namespace tessera::testing::placement_test
