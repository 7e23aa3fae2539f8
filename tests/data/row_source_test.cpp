// The rows of all ranks together are one order at any number of ranks, and a position is all that a resume needs.
#include <tessera/data/row_source.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <numeric>
#include <stdexcept>

#include <tessera/data/order/row_order.h>
#include <tessera/training/metrics.h>

#include <tessera/tests/support/draw.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing::row_source_test {
namespace {

using Rows = std::vector<int64_t>;

/// Rows that are their own indices; counts what is read of it.
struct Numbers {
  int64_t rows;
  std::shared_ptr<std::atomic<int64_t>> reads = std::make_shared<std::atomic<int64_t>>(0);

  int64_t size() const { return rows; }
  Rows get(const std::vector<size_t>& batch) const {
    *reads += std::ssize(batch);
    return {batch.begin(), batch.end()};
  }
};
using Source = RowSource<Numbers>;

DeviceMesh world_mesh() { return init_device_mesh(torch::kCPU, {world_size()}, {"dp"}); }
/// This rank alone.
DeviceMesh alone() { return make_device_mesh(torch::kCPU, {1}, {world_rank()}); }

/// The batches up to the end of the epoch.
std::vector<Rows> rest_of_epoch(Source& source) {
  std::vector<Rows> batches;
  while (auto batch = source.next()) batches.push_back(std::move(*batch));
  return batches;
}

Rows joined(const std::vector<Rows>& batches) {
  Rows rows;
  for (const auto& batch : batches) rows.insert(rows.end(), batch.begin(), batch.end());
  return rows;
}

/// All ranks' rows of one step, dealt together again: the ranks' first rows, then their second ones, and so on.
Rows together(const Rows& mine, int64_t batch) {
  const auto slots = torch::full({world_size(), batch}, 0, torch::kLong);
  for (int64_t i = 0; i < std::ssize(mine); ++i) slots[world_rank()][i] = mine[static_cast<size_t>(i)] + 1;
  const auto all = tessera::all_reduce(slots, world_mesh(), ReduceOp::kSum).t().contiguous();
  Rows rows;
  for (int64_t i = 0; i < all.numel(); ++i) {
    if (const auto row = all.view(-1)[i].item<int64_t>(); row > 0) rows.push_back(row - 1);
  }
  return rows;
}

struct Case {
  int64_t rows, batch;
  RowOptions options;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const int64_t rows : {4, 5, 7, 24, 61}) {
    for (const int64_t batch : {1, 2, 3, 8, 100}) {
      for (const auto last_rows : {LastRows::kRepeat, LastRows::kDrop, LastRows::kUneven}) {
        if (last_rows == LastRows::kUneven && batch == 1) continue; // an error where the ranks do not divide the rows
        for (const auto kind : {ShuffleKind::kPython, ShuffleKind::kComputed}) {
          all.push_back({rows, batch, {batch, true, 7, last_rows, kind}});
        }
        all.push_back({rows, batch, {batch, false, 7, last_rows}});
      }
    }
  }
  return all;
}

TEST(RowSource, ShowsAllRanksTogetherOneOrder) {
  for (const auto& [rows, batch, options] : sweep(cases(), 40)) {
    SCOPED_TRACE(c10::str(rows, " rows by ", batch, ", last ", static_cast<int>(options.last_rows)));
    Source source(Numbers{rows}, world_mesh(), options);
    auto one = options;
    one.batch = 2 * rows;
    Source reference(Numbers{rows}, alone(), one);
    for (int64_t epoch = 0; epoch < 2; ++epoch) {
      const auto order = joined(rest_of_epoch(reference));
      ASSERT_EQ(std::ssize(order), rows);
      Rows seen;
      int64_t batches = 0;
      while (const auto mine = source.next()) {
        const auto step = together(*mine, batch);
        EXPECT_LE(std::ssize(step), batch * world_size());
        seen.insert(seen.end(), step.begin(), step.end());
        EXPECT_EQ(source.position(), (DataPosition{epoch, std::ssize(seen)}));
        ++batches;
      }
      EXPECT_EQ(batches, source.batches_per_epoch());
      const auto repeated = (rows + world_size() - 1) / world_size() * world_size();
      const auto dropped = rows / world_size() * world_size();
      EXPECT_EQ(std::ssize(seen), options.last_rows == LastRows::kRepeat ? repeated
                                  : options.last_rows == LastRows::kDrop ? dropped
                                                                         : rows);
      for (size_t i = 0; i < seen.size(); ++i) ASSERT_EQ(seen[i], order[i % order.size()]) << "place " << i;
    }
  }
}

TEST(RowSource, GoesOnAnywhereWithoutReadingWhatLiesBefore) {
  for (const auto& [rows, batch, options] : sweep(cases(), 20)) {
    SCOPED_TRACE(c10::str(rows, " rows by ", batch, ", last ", static_cast<int>(options.last_rows)));
    Source whole(Numbers{rows}, world_mesh(), options);
    std::vector<DataPosition> positions{whole.position()};
    std::vector<Rows> batches;
    for (int64_t epoch = 0; epoch < 2; ++epoch) { // a `next` without a batch goes to the next epoch
      while (auto batch_here = whole.next()) {
        batches.push_back(std::move(*batch_here));
        positions.push_back(whole.position());
      }
      EXPECT_EQ(whole.position(), (DataPosition{epoch + 1, 0}));
    }
    const auto per_epoch = static_cast<size_t>(whole.batches_per_epoch());
    for (size_t at = 0; at < batches.size(); ++at) {
      Source resumed(Numbers{rows}, world_mesh(), options);
      resumed.seek(positions[at]);
      EXPECT_EQ(resumed.position(), positions[at]);
      if (at == per_epoch) EXPECT_FALSE(resumed.next()); // the position is still that of the first epoch's end
      const auto next = resumed.next();
      ASSERT_TRUE(next);
      EXPECT_EQ(*next, batches[at]);
      EXPECT_EQ(*resumed.data().reads, std::ssize(*next));
    }
  }
}

TEST(RowSource, GoesOnWithAnotherNumberOfRanks) {
  constexpr int64_t kRows = 50, kBatch = 3;
  Source one(Numbers{kRows}, alone(), {.batch = kRows, .seed = 5, .last_rows = LastRows::kDrop});
  const auto order = joined(rest_of_epoch(one));
  Source source(Numbers{kRows}, world_mesh(), {.batch = kBatch, .seed = 5, .last_rows = LastRows::kDrop});
  while (source.next()) {
    Source other(Numbers{kRows}, alone(), {.batch = kRows, .seed = 5, .last_rows = LastRows::kDrop});
    other.seek(source.position());
    const Rows rest(order.begin() + source.position().row, order.end());
    EXPECT_EQ(joined(rest_of_epoch(other)), rest);
  }
}

TEST(RowSource, GivesRanksThatShareAPositionTheSameRows) {
  if (world_size() % 2 != 0) GTEST_SKIP() << "the ranks are no pairs";
  const auto mesh = init_device_mesh(torch::kCPU, {world_size() / 2, 2}, {"dp", "tp"});
  Source source(Numbers{16}, mesh["dp"], {.batch = 4, .seed = 1});
  while (const auto mine = source.next()) {
    const auto sum = tessera::all_reduce(torch::tensor(*mine), mesh["tp"], ReduceOp::kSum);
    EXPECT_TENSORS_EQUAL(sum, torch::tensor(*mine) * 2);
  }
}

TEST(RowSource, ShufflesEachEpochAndSeedAnew) {
  const auto epochs = [](uint64_t seed, ShuffleKind kind) {
    Source source(Numbers{40}, alone(), {.batch = 40, .seed = seed, .shuffle_kind = kind});
    return std::vector{joined(rest_of_epoch(source)), joined(rest_of_epoch(source))};
  };
  for (const auto kind : {ShuffleKind::kPython, ShuffleKind::kComputed}) {
    const auto first = epochs(3, kind);
    EXPECT_EQ(first, epochs(3, kind));
    EXPECT_NE(first[0], first[1]);
    EXPECT_NE(first[0], epochs(5, kind)[0]);
  }
  EXPECT_NE(epochs(3, ShuffleKind::kPython), epochs(3, ShuffleKind::kComputed));
  EXPECT_EQ(epochs(3, ShuffleKind::kPython), epochs(3, ShuffleKind::kBySize));
}

TEST(RowOrder, ComputesAPermutationOfAnyNumberOfRows) {
  for (const int64_t rows : {1, 2, 3, 4, 5, 8, 9, 100, 1000, 4097}) {
    const auto order = internal::RowOrder::computed(rows, 11);
    Rows found(static_cast<size_t>(rows));
    for (int64_t i = 0; i < rows; ++i) found[static_cast<size_t>(i)] = order[i];
    std::sort(found.begin(), found.end());
    for (int64_t i = 0; i < rows; ++i) ASSERT_EQ(found[static_cast<size_t>(i)], i) << rows << " rows";
  }
}

/// How often the rows of a quarter come in a quarter of the places: with a drawn permutation it varies by about 1 / sqrt(count).
TEST(RowOrder, ComputesAnOrderThatLooksDrawn) {
  constexpr int64_t kRows = 40000, kQuarter = kRows / 4;
  for (const uint64_t seed : {0, 1, 2}) {
    const auto order = internal::RowOrder::computed(kRows, seed);
    torch::Tensor counts = torch::zeros({4, 4}, torch::kLong);
    int64_t ascents = 0;
    for (int64_t i = 0; i < kRows; ++i) {
      counts[i / kQuarter][order[i] / kQuarter] += 1;
      if (i > 0 && order[i] > order[i - 1]) ++ascents;
    }
    EXPECT_LE((counts - kQuarter / 4).abs().max().item<int64_t>(), 250); // five standard deviations of 43
    EXPECT_NEAR(static_cast<double>(ascents), kRows / 2.0, 300);         // of 58
  }
}

TEST(RowOrder, NeedsNoMemoryForBillionsOfRows) {
  constexpr int64_t kRows = int64_t{5} << 32;
  const auto order = internal::RowOrder::computed(kRows, 1);
  Rows rows;
  for (int64_t i = 0; i < 1000; ++i) rows.push_back(order[i * (kRows / 1000)]);
  std::sort(rows.begin(), rows.end());
  EXPECT_EQ(std::adjacent_find(rows.begin(), rows.end()), rows.end());
  EXPECT_GE(rows.front(), 0);
  EXPECT_LT(rows.back(), kRows);
  Source source(Numbers{kRows}, world_mesh(), {.batch = 4}); // kBySize
  source.seek({3, kRows / 2 / world_size() * world_size()});
  EXPECT_EQ(source.next()->size(), 4U);
}

/// Throws for one row, once.
struct Fragile {
  std::shared_ptr<bool> is_broken = std::make_shared<bool>(true);
  int64_t size() const { return 24; }
  Rows get(const std::vector<size_t>& batch) const {
    if (batch.front() >= 12 && std::exchange(*is_broken, false)) throw std::runtime_error("the disk is gone");
    return {batch.begin(), batch.end()};
  }
};

TEST(RowSource, StaysBeforeABatchThatCannotBeRead) {
  RowSource<Fragile> source(Fragile{}, world_mesh(), {.batch = 2, .shuffle = false});
  Source expected(Numbers{24}, world_mesh(), {.batch = 2, .shuffle = false});
  std::vector<Rows> batches;
  for (;;) {
    const auto before = source.position();
    try {
      auto batch = source.next();
      if (!batch) break;
      batches.push_back(*batch);
    } catch (const std::runtime_error&) {
      EXPECT_EQ(source.position(), before);
    }
  }
  EXPECT_FALSE(*Fragile(source.data()).is_broken);
  EXPECT_EQ(batches, rest_of_epoch(expected));
}

TEST(RowSource, NamesWhatIsWrong) {
  const auto mesh = world_mesh();
  EXPECT_THROWS_WITH(Source(Numbers{8}, mesh, {.batch = 0}), "RowSource: a batch of 0 rows");
  EXPECT_THROWS_WITH(Source(Numbers{0}, mesh, {}), "0 rows are fewer than the");
  for (const auto last_rows : {LastRows::kDrop, LastRows::kUneven}) {
    Source source(Numbers{8}, mesh, {.last_rows = last_rows});
    EXPECT_THROWS_WITH(source.seek({2, 9}), "row 9 of epoch 2 is past the end: the data has 8 rows");
  }
  Source source(Numbers{8}, mesh, {});
  EXPECT_THROWS_WITH(source.seek({0, 16}), "the first row is 16, and the data has 8 rows");
  EXPECT_THROWS_WITH(source.seek({-1, 0}), "the epoch -1 is negative");
  EXPECT_THROWS_WITH(source.seek({0, -4}), "the first row is -4");
  EXPECT_EQ(source.position(), DataPosition{});
}

TEST(DataSource, HoldsAnySource) {
  DataSource<Rows> any = Source(Numbers{8}, alone(), {.batch = 4, .shuffle = false});
  EXPECT_EQ(any.next(), (Rows{0, 1, 2, 3}));
  auto moved = std::move(any);
  EXPECT_EQ(moved.position(), (DataPosition{0, 4}));
  moved.seek({2, 2});
  EXPECT_EQ(moved.next(), (Rows{2, 3, 4, 5}));
}

} // namespace
} // namespace tessera::testing::row_source_test
