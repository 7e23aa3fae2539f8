#include <gmock/gmock.h>
#include <tessera/dtensor/layout/box.h>
#include <torch/torch.h>

#include <tessera/tests/support/matchers.h>

namespace tessera::testing::box_test {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using Sizes = std::vector<int64_t>;

// Row-major positions, in the whole tensor, of a box's elements.
Sizes positions(const Sizes& sizes, const internal::Box& box) {
  const auto all = torch::arange(internal::whole(sizes).numel()).view(sizes);
  auto part = all;
  for (size_t d = 0; d < sizes.size(); ++d) part = part.narrow(static_cast<int64_t>(d), box.offsets[d], box.sizes[d]);
  part = part.contiguous();
  return {part.data_ptr<int64_t>(), part.data_ptr<int64_t>() + part.numel()};
}

Sizes positions(const Sizes& sizes, const std::vector<internal::Box>& boxes) {
  Sizes all;
  for (const auto& box : boxes) {
    const auto part = positions(sizes, box);
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

TEST(BoxesOfRange, CoverExactlyTheRangeInOrder) {
  for (const Sizes& sizes : {Sizes{7}, Sizes{3, 4}, Sizes{1, 5}, Sizes{2, 3, 4}, Sizes{3, 1, 2}, Sizes{2, 2, 2, 3}}) {
    for (int64_t dim = 0; dim < static_cast<int64_t>(sizes.size()); ++dim) {
      int64_t flat = 1, inner = 1;
      for (int64_t d = 0; d < static_cast<int64_t>(sizes.size()); ++d) (d <= dim ? flat : inner) *= sizes[d];
      for (int64_t begin = 0; begin <= flat; ++begin) {
        for (int64_t end = begin; end <= flat; ++end) {
          const auto boxes = internal::boxes_of_range(internal::whole(sizes), dim, begin, end);
          Sizes expected;
          for (auto at = begin * inner; at < end * inner; ++at) expected.push_back(at);
          ASSERT_EQ(positions(sizes, boxes), expected)
              << at::IntArrayRef(sizes) << " dim " << dim << " [" << begin << ", " << end << ")";
          ASSERT_LE(static_cast<int64_t>(boxes.size()), 2 * dim + 1);
        }
      }
    }
  }
}

TEST(BoxesOfRange, OfAnEmptyTensorAreNone) { EXPECT_TRUE(internal::boxes_of_range(internal::whole({0, 3}), 0, 0, 0).empty()); }

TEST(LocalBoxes, ShardFollowsChunk) {
  for (int64_t n = 0; n <= 9; ++n) {
    for (int64_t ranks = 1; ranks <= 4; ++ranks) {
      for (const int64_t dim : {0, 1, -1}) {
        const Sizes sizes = dim == 0 ? Sizes{n, 3} : Sizes{3, n};
        const auto all = torch::arange(3 * n).view(sizes);
        const auto chunks = all.chunk(ranks, dim);
        for (int64_t rank = 0; rank < ranks; ++rank) {
          Sizes expected;
          if (rank < static_cast<int64_t>(chunks.size())) {
            const auto chunk = chunks[rank].contiguous();
            expected.assign(chunk.data_ptr<int64_t>(), chunk.data_ptr<int64_t>() + chunk.numel());
          }
          ASSERT_EQ(positions(sizes, internal::local_boxes(sizes, {Shard{dim}}, {ranks}, {rank})), expected)
              << n << " over " << ranks;
        }
      }
    }
  }
}

TEST(LocalBoxes, ReplicateHoldsAll) {
  EXPECT_EQ(internal::local_boxes({4, 2}, {Replicate{}}, {3}, {1}), std::vector<internal::Box>{internal::whole({4, 2})});
  EXPECT_EQ(internal::local_boxes({}, {Replicate{}}, {3}, {1}), std::vector<internal::Box>{internal::whole({})});
}

TEST(LocalBoxes, PlacementsApplyFromTheFirstMeshDim) {
  // 7 rows over 2, then over 3: 4 + 3 rows, then 2 + 2 + 0 and 1 + 1 + 1.
  EXPECT_EQ(internal::local_boxes({7, 2}, {Shard{0}, Shard{0}}, {2, 3}, {0, 1}), (std::vector<internal::Box>{{{2, 0}, {2, 2}}}));
  EXPECT_EQ(internal::local_boxes({7, 2}, {Shard{0}, Shard{0}}, {2, 3}, {0, 2}), std::vector<internal::Box>{});
  EXPECT_EQ(internal::local_boxes({7, 2}, {Shard{0}, Shard{0}}, {2, 3}, {1, 2}), (std::vector<internal::Box>{{{6, 0}, {1, 2}}}));
  EXPECT_EQ(internal::local_boxes({4, 6}, {Shard{1}, Shard{0}}, {2, 2}, {1, 0}), (std::vector<internal::Box>{{{0, 3}, {2, 3}}}));
}

TEST(LocalBoxes, RaggedRowsAndElements) {
  const RaggedShard rows{0, {3, 0, 2}};
  EXPECT_EQ(internal::local_boxes({5, 2}, {rows}, {3}, {0}), (std::vector<internal::Box>{{{0, 0}, {3, 2}}}));
  EXPECT_EQ(internal::local_boxes({5, 2}, {rows}, {3}, {1}), std::vector<internal::Box>{});
  EXPECT_EQ(internal::local_boxes({5, 2}, {rows}, {3}, {2}), (std::vector<internal::Box>{{{3, 0}, {2, 2}}}));
  const RaggedShard elements{1, {5, 9}}; // of 2 × 7
  EXPECT_EQ(internal::local_boxes({2, 7}, {elements}, {2}, {0}), (std::vector<internal::Box>{{{0, 0}, {1, 5}}}));
  EXPECT_EQ(internal::local_boxes({2, 7}, {elements}, {2}, {1}),
            (std::vector<internal::Box>{{{0, 5}, {1, 2}}, {{1, 0}, {1, 7}}}));
}

TEST(LocalBoxes, RaggedWithShards) {
  const RaggedShard rows{0, {1, 3}};
  // Replicated, then ragged: hybrid sharding.
  EXPECT_EQ(internal::local_boxes({4, 2}, {Replicate{}, rows}, {2, 2}, {1, 1}), (std::vector<internal::Box>{{{1, 0}, {3, 2}}}));
  // Columns sharded first or last.
  EXPECT_EQ(internal::local_boxes({4, 2}, {Shard{1}, rows}, {2, 2}, {1, 0}), (std::vector<internal::Box>{{{0, 1}, {1, 1}}}));
  EXPECT_EQ(internal::local_boxes({4, 2}, {rows, Shard{1}}, {2, 2}, {0, 1}), (std::vector<internal::Box>{{{0, 1}, {1, 1}}}));
  // The ragged rows split once more.
  EXPECT_EQ(internal::local_boxes({4, 2}, {rows, Shard{0}}, {2, 2}, {1, 1}), (std::vector<internal::Box>{{{3, 0}, {1, 2}}}));
}

/// The extents are those of the largest part, of 3 rows or columns; here it is the smaller one.
TEST(LocalBoxes, RaggedRangesOfParts) {
  const RaggedShard elements{1, {4, 5}};
  const auto of = [&](const Sizes& sizes, int64_t dim, int64_t index) {
    return internal::local_boxes(sizes, {Shard{dim}, elements}, {2, 2}, {1, index});
  };
  EXPECT_EQ(of({5, 3}, 0, 0), (std::vector<internal::Box>{{{3, 0}, {1, 3}}, {{4, 0}, {1, 1}}}));
  EXPECT_EQ(of({5, 3}, 0, 1), (std::vector<internal::Box>{{{4, 1}, {1, 2}}}));
  EXPECT_EQ(of({3, 5}, 1, 0), (std::vector<internal::Box>{{{0, 3}, {2, 2}}}));
  EXPECT_EQ(of({3, 5}, 1, 1), (std::vector<internal::Box>{{{2, 3}, {1, 2}}}));
  EXPECT_THAT(error_of([&] { of({6, 3}, 1, 0); }), HasSubstr("add up to 9 where the tensor has 12"));
}

TEST(LocalBoxes, ErrorsNameWhatDoesNotFit) {
  EXPECT_EQ(error_of([] { internal::local_boxes({4}, {Partial{}}, {2}, {0}); }),
            "a tensor with placement Partial has no value of its own; redistribute it first");
  EXPECT_THAT(error_of([] { internal::local_boxes({4}, {Shard{1}}, {2}, {0}); }), HasSubstr("Shard(1) of a tensor with 1 dims"));
  EXPECT_THAT(error_of([] {
                internal::local_boxes({4}, {RaggedShard{0, {1, 2}}}, {2}, {0});
              }),
              HasSubstr("add up to 3 where the tensor has 4"));
  EXPECT_THAT(error_of([] {
                internal::local_boxes({4}, {RaggedShard{0, {4}}}, {2}, {0});
              }),
              HasSubstr("1 extents on a mesh dim of 2 ranks"));
  EXPECT_THAT(error_of([] {
                internal::local_boxes({4, 2}, {RaggedShard{1, {4, 4}}, Shard{0}}, {2, 2}, {0, 0});
              }),
              HasSubstr("cannot be described as boxes"));
  EXPECT_THAT(error_of([] { internal::local_boxes({4}, {}, {2}, {0}); }), HasSubstr("0 placements on a mesh of 1 dims"));
}

TEST(Intersect, OfBoxes) {
  EXPECT_EQ(internal::intersect({{0, 2}, {3, 4}}, {{2, 0}, {5, 3}}), (internal::Box{{2, 2}, {1, 1}}));
  EXPECT_EQ(internal::intersect({{0}, {3}}, {{3}, {2}}), std::nullopt);
  EXPECT_EQ(internal::intersect(internal::whole({}), internal::whole({})), internal::whole({}));
}

TEST(FindOverlap, NamesTwoBoxesThatMeet) {
  const auto find = [](const std::vector<internal::Box>& boxes) {
    std::vector<const internal::Box*> pointers;
    for (const auto& box : boxes) pointers.push_back(&box);
    return internal::find_overlap(pointers);
  };
  EXPECT_EQ(find({}), std::nullopt);
  EXPECT_EQ(find({{{}, {}}}), std::nullopt);
  EXPECT_EQ(find({{{}, {}}, {{}, {}}}), std::pair(size_t{0}, size_t{1}));
  EXPECT_EQ(find({{{0, 0}, {2, 2}}, {{0, 2}, {2, 1}}, {{2, 0}, {1, 3}}}), std::nullopt);
  EXPECT_EQ(find({{{2, 0}, {1, 3}}, {{0, 2}, {2, 1}}, {{0, 1}, {1, 2}}}), std::pair(size_t{1}, size_t{2}));
  EXPECT_EQ(find({{{0, 0}, {2, 2}}, {{1, 1}, {0, 2}}, {{1, 1}, {1, 0}}}), std::nullopt); // empty ones
  EXPECT_EQ(find({{{0}, {9}}, {{1}, {1}}, {{3}, {1}}}), std::pair(size_t{0}, size_t{1}));
}

TEST(Fits, RejectsWhatOverflows) {
  const auto max = std::numeric_limits<int64_t>::max();
  EXPECT_TRUE(internal::fits({{2}, {2}}, {4}));
  EXPECT_FALSE(internal::fits({{3}, {2}}, {4}));
  EXPECT_FALSE(internal::fits({{max}, {max}}, {4}));
  EXPECT_FALSE(internal::fits({{0, 0}, {1, 1}}, {4}));
}

} // namespace
} // namespace tessera::testing::box_test
