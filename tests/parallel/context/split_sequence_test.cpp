#include <gtest/gtest.h>
#include <torch/torch.h>

#include <vector>

#include <tessera/parallel/split_sequence.h>

#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/test_device.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing::split_sequence_test {
namespace {

constexpr PartOrder kOrders[] = {PartOrder::kContiguous, PartOrder::kHeadTail};

DeviceMesh cp_mesh() { return init_device_mesh(test_device_type(), {world_size()}, {"cp"}); }

TEST(SplitSequence, IsUndoneByMergeSequence) {
  const auto mesh = cp_mesh();
  for (const auto order : kOrders) {
    for (const int64_t length : {0, 1, 2, 7, 8, 13, 24}) {
      SCOPED_TRACE(c10::str("length ", length));
      torch::manual_seed(length);
      const auto tokens = torch::randint(100, {3, length}, torch::kLong), features = torch::randn({length, 2, 5});
      const auto before = tokens.clone();
      const auto parts = split_sequence({tokens, features}, {-1, 0}, mesh, {.order = order});
      EXPECT_EQ(parts.length % world_size(), 0);
      EXPECT_EQ(parts.tensors[0].local().size(1), parts.length / world_size());
      EXPECT_TENSORS_EQUAL(merge_sequence(parts.tensors[0], 1).cpu(), tokens);
      EXPECT_TENSORS_EQUAL(merge_sequence(parts.tensors[1], -3).cpu(), features);
      EXPECT_TENSORS_EQUAL(merge_sequence(parts.positions, 0).cpu(), torch::arange(length));
      EXPECT_TENSORS_EQUAL(tokens, before);
      EXPECT_FALSE(parts.labels.defined());
    }
  }
}

TEST(SplitSequence, PutsPositionsBesideWhatLiesThere) {
  const auto mesh = cp_mesh();
  for (const auto order : kOrders) {
    const int64_t length = 16 * world_size();
    const auto parts = split_sequence({torch::arange(length)}, {0}, mesh, {.order = order});
    const auto mine = parts.tensors[0].local();
    EXPECT_TENSORS_EQUAL(mine.cpu(), DTensor(parts.positions).local().cpu());
    const auto ranges = internal::part_ranges(order, length, world_size(), world_rank());
    EXPECT_EQ(mine[0].item<int64_t>(), ranges[0].begin);
    EXPECT_EQ(mine[-1].item<int64_t>(), ranges.back().end - 1);
    EXPECT_EQ(ranges.size(), order == PartOrder::kHeadTail && world_size() > 1 ? 2U : 1U);
  }
}

TEST(SplitSequence, ShiftsLabelsBeforeTheSplit) {
  const auto mesh = cp_mesh();
  for (const auto order : kOrders) {
    for (const int64_t length : {0, 1, 5, 16}) {
      const auto tokens = torch::arange(2 * length).view({2, length});
      const auto parts = split_sequence({tokens}, {1}, mesh, {.order = order, .labels_of = 0});
      auto expected = torch::full({2, length}, -100, torch::kLong);
      if (length > 1) expected.slice(1, 0, -1).copy_(tokens.slice(1, 1));
      EXPECT_TENSORS_EQUAL(merge_sequence(parts.labels, 1).cpu(), expected);
      // No padded position counts: all ranks together have as many labels as one process.
      auto valid = DTensor(parts.labels).local().ne(-100).sum().reshape({1});
      mesh.communicator(0)->all_reduce(valid, ReduceOp::kSum, "labels").wait();
      EXPECT_EQ(valid.item<int64_t>(), 2 * std::max<int64_t>(length - 1, 0));
    }
  }
}

TEST(SplitSequence, PadsAtTheEndWithTheGivenValues) {
  const auto mesh = cp_mesh();
  const auto length = 2 * world_size() + 1;
  const auto parts =
      split_sequence({torch::ones({length}), torch::ones({length}, torch::kLong)}, {0, 0}, mesh, {.pad_values = {7.5}});
  const auto padding = parts.length - length;
  EXPECT_EQ(padding, world_size() == 1 ? 0 : 2 * world_size() - 1);
  const auto first = parts.tensors[0].full_tensor().cpu(), second = parts.tensors[1].full_tensor().cpu();
  EXPECT_EQ(first.eq(7.5).sum().item<int64_t>(), padding);
  EXPECT_EQ(second.eq(0).sum().item<int64_t>(), padding);
}

TEST(SplitSequence, NamesWhatIsWrong) {
  const auto mesh = cp_mesh();
  const auto tokens = torch::zeros({2, 6}, torch::kLong);
  EXPECT_THROWS_WITH(split_sequence({tokens}, {2}, mesh), "tensor 0 of the batch has no dim 2, it has 2 dims");
  EXPECT_THROWS_WITH(split_sequence({tokens}, {}, mesh), "1 tensors and 0 dims are given");
  EXPECT_THROWS_WITH(split_sequence({torch::Tensor()}, {0}, mesh), "tensor 0 of the batch is undefined");
  EXPECT_THROWS_WITH(split_sequence({tokens, torch::zeros({5})}, {1, 0}, mesh),
                     "tensor 1 of the batch has a sequence of 5, and tensor 0 one of 6");
  EXPECT_THROWS_WITH(split_sequence({torch::zeros({4}, torch::requires_grad())}, {0}, mesh), "split before the embedding");
  EXPECT_THROWS_WITH(split_sequence({torch::zeros({4})}, {0}, mesh, {.labels_of = 0}), "labels of a tensor of Float");
  EXPECT_THROWS_WITH(split_sequence({tokens}, {1}, mesh, {.labels_of = 3}), "labels_of is 3, and the batch has 1 tensors");
  EXPECT_THROWS_WITH(mesh["sp"], "sp");
  EXPECT_THROWS_WITH(merge_sequence(tokens, 1), "the tensor is plain");
  EXPECT_THROWS_WITH(merge_sequence(distribute_tensor(tokens, mesh, {Shard{1}}), 1), "was not split by split_sequence");
  const auto two = init_device_mesh(test_device_type(), {1, world_size()}, {"dp", "cp"});
  EXPECT_THROWS_WITH(split_sequence({tokens}, {1}, two), "a mesh of one dim is needed, such as mesh[\"cp\"]");
}

TEST(SplitSequence, NamesTheNearestLengthsWhereItMayNotPad) {
  const auto mesh = cp_mesh();
  if (world_size() == 1) GTEST_SKIP() << "each length divides";
  const auto chunks = 2 * world_size();
  EXPECT_THROWS_WITH(split_sequence({torch::zeros({chunks + 1})}, {0}, mesh, {.pads = false}),
                     c10::str("a sequence of ", chunks + 1, " does not divide into ", chunks,
                              " equal chunks, which the order head-tail needs on ", world_size(),
                              " ranks; the nearest lengths that do are ", chunks, " and ", 2 * chunks));
}

TEST(SplitSequence, NamesTheRankWhoseBatchDiffers) {
  const auto mesh = cp_mesh();
  if (world_size() == 1) GTEST_SKIP() << "one rank has one batch";
  const auto last = last_rank(), own = world_rank() == last ? int64_t{1} : int64_t{0};
  EXPECT_THROWS_WITH(split_sequence({torch::zeros({8 + own})}, {0}, mesh),
                     c10::str("tensor 0 of the batch of rank ", last, " has a sequence of 9, that of rank 0 one of 8"));
  EXPECT_THROWS_WITH(split_sequence({torch::zeros({8, 2 + own})}, {0}, mesh),
                     c10::str("tensor 0 of the batch of rank ", last, " has another shape or dtype than that of rank 0"));
  auto values = torch::arange(8);
  if (own != 0) std::swap(values.data_ptr<int64_t>()[2], values.data_ptr<int64_t>()[3]);
  EXPECT_THROWS_WITH(split_sequence({values}, {0}, mesh),
                     c10::str("tensor 0 of the batch of rank ", last, " has other values than that of rank 0"));
  EXPECT_EQ(split_sequence({values}, {0}, mesh, {.compares_values = false}).tensors.size(), 1U);
}

TEST(CheckSameBatch, NamesTheRankWhoseBatchDiffers) {
  const auto mesh = init_device_mesh(test_device_type(), {world_size()}, {"tp"});
  const auto tokens = torch::arange(12).view({3, 4});
  const auto empty = torch::zeros({0}), number = torch::tensor(0.5);
  EXPECT_NO_THROW(check_same_batch({tokens, empty, number}, mesh));
  if (world_size() == 1) return;
  const bool is_last = world_rank() == last_rank();
  const auto other_than_first = [](int64_t tensor) {
    return c10::str("check_same_batch: tensor ", tensor, " of the batch of rank ", last_rank(),
                    " has other values than that of rank 0");
  };
  EXPECT_THROWS_WITH(check_same_batch({is_last ? tokens + 1 : tokens, number}, mesh), other_than_first(0));
  EXPECT_THROWS_WITH(check_same_batch({tokens, is_last ? number * 2 : number}, mesh), other_than_first(1));
  EXPECT_THROWS_WITH(check_same_batch({is_last ? tokens.to(torch::kInt) : tokens}, mesh), "another shape or dtype");
}

} // namespace
} // namespace tessera::testing::split_sequence_test
