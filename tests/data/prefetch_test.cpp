// Batches that are read ahead: the same ones in the same order, whatever happens meanwhile.
#include <tessera/data/prefetch.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <stdexcept>

#include <tessera/data/row_source.h>

#include <tessera/tests/support/draw.h>
#include <tessera/tests/support/forked_ranks.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing::prefetch_test {
namespace {

using Rows = std::vector<int64_t>;

/// Rows that are their own indices. Row `broken` cannot be read.
struct Numbers {
  int64_t rows;
  std::shared_ptr<std::atomic<int64_t>> broken = std::make_shared<std::atomic<int64_t>>(-1);
  std::shared_ptr<std::atomic<int64_t>> reads = std::make_shared<std::atomic<int64_t>>(0);

  int64_t size() const { return rows; }
  Rows get(const std::vector<size_t>& batch) const {
    ++*reads;
    for (const auto row : batch) {
      if (static_cast<int64_t>(row) == *broken) throw std::runtime_error("row " + std::to_string(row) + " is broken");
    }
    return {batch.begin(), batch.end()};
  }
};

RowSource<Numbers> numbers(const Numbers& data, int64_t batch = 3) {
  return {data, init_device_mesh(torch::kCPU, {world_size()}, {"dp"}), {.batch = batch, .seed = 2}};
}

/// A stream of 0, 1, 2, … in epochs of ten, which only goes forward.
struct Stream {
  int64_t next_number = 0;
  std::shared_ptr<std::atomic<int64_t>> reads = std::make_shared<std::atomic<int64_t>>(0);
  bool is_at_end = false;

  std::optional<int64_t> next() {
    ++*reads;
    if (!is_at_end && next_number > 0 && next_number % 10 == 0) {
      is_at_end = true;
      return std::nullopt;
    }
    is_at_end = false;
    if (next_number == 15) {
      ++next_number;
      throw std::runtime_error("no number 15");
    }
    return next_number++;
  }
  DataPosition position() const { return {next_number / 10, next_number % 10}; }
  void seek(const DataPosition& to) {
    next_number = 10 * to.epoch + to.row;
    is_at_end = true; // it does not end where it begins
  }
};

TEST(Prefetch, GivesTheSameBatchesInTheSameOrder) {
  for (const int64_t workers : {1, 2, 4}) {
    for (const int64_t depth : {1, 2, 7}) {
      auto plain = numbers({50});
      auto ahead = prefetch(numbers({50}), {depth, workers});
      EXPECT_EQ(ahead.position(), plain.position());
      for (int i = 0; i < 60; ++i) { // several epochs
        ASSERT_EQ(ahead.next(), plain.next()) << "batch " << i << " with " << workers << " workers";
        ASSERT_EQ(ahead.position(), plain.position());
      }
    }
  }
}

TEST(Prefetch, ReadsNoFurtherThanItsDepth) {
  const Numbers data{1000};
  auto ahead = prefetch(numbers(data, 1), {.depth = 5, .workers = 2});
  EXPECT_EQ(*data.reads, 0); // nothing before the first `next`
  for (int64_t given = 1; given < 100; ++given) {
    ASSERT_TRUE(ahead.next());
    EXPECT_GE(*data.reads, given);
    EXPECT_LE(*data.reads, given + 5);
  }
}

TEST(Prefetch, GoesWhereItIsSent) {
  Draw draw(test_seed());
  for (const int64_t workers : {1, 3}) {
    auto plain = numbers({64});
    auto ahead = prefetch(numbers({64}), {.depth = 3, .workers = workers});
    for (int i = 0; i < 100; ++i) {
      if (draw.chance(20)) {
        const DataPosition position{draw.below(4), draw.below(10) * 3 * world_size() % 60};
        plain.seek(position);
        ahead.seek(position);
      }
      ASSERT_EQ(ahead.position(), plain.position());
      ASSERT_EQ(ahead.next(), plain.next());
    }
  }
}

TEST(Prefetch, ThrowsWhereTheSourceWouldHave) {
  for (const int64_t workers : {1, 3}) {
    const Numbers data{48};
    auto order = numbers({48});
    Rows rows;
    for (int i = 0; i < 4; ++i) rows = *order.next();
    *data.broken = rows.back(); // of this rank's fourth batch
    auto ahead = prefetch(numbers(data), {.depth = 4, .workers = workers});
    auto plain = numbers({48});
    for (int i = 0; i < 3; ++i) EXPECT_EQ(ahead.next(), plain.next());
    for (int again = 0; again < 3; ++again) {
      EXPECT_THROWS_WITH(ahead.next(), c10::str("row ", rows.back(), " is broken"));
      EXPECT_EQ(ahead.position(), plain.position());
    }
    *data.broken = -1;
    while (const auto expected = plain.next()) EXPECT_EQ(ahead.next(), expected);
  }
}

TEST(Prefetch, ReadsAStreamAhead) {
  auto ahead = prefetch(Stream{}, {.depth = 3});
  for (int64_t i = 0; i < 10; ++i) EXPECT_EQ(ahead.next(), i);
  EXPECT_FALSE(ahead.next());
  for (int64_t i = 10; i < 15; ++i) EXPECT_EQ(ahead.next(), i);
  EXPECT_EQ(ahead.position(), (DataPosition{1, 5}));
  EXPECT_THROWS_WITH(ahead.next(), "no number 15");
  EXPECT_EQ(ahead.next(), 16);
  ahead.seek({7, 3});
  EXPECT_EQ(ahead.position(), (DataPosition{7, 3}));
  EXPECT_EQ(ahead.next(), 73);
}

TEST(Prefetch, IsASourceAsAnyOther) {
  DataSource<Rows> any = prefetch(DataSource<Rows>(prefetch(numbers({20}))), {.depth = 2});
  auto plain = numbers({20});
  for (int i = 0; i < 5; ++i) EXPECT_EQ(any.next(), plain.next());
  auto moved = std::move(any);
  for (int i = 0; i < 30; ++i) ASSERT_EQ(moved.next(), plain.next());
}

TEST(Prefetch, MovesWhileItReads) {
  auto first = prefetch(numbers({500}), {.depth = 4, .workers = 2});
  auto second = prefetch(numbers({30}), {.depth = 4, .workers = 2});
  auto plain = numbers({500});
  EXPECT_EQ(first.next(), plain.next());
  EXPECT_TRUE(second.next());
  second = std::move(first); // whose threads go on reading
  for (int i = 0; i < 20; ++i) EXPECT_EQ(second.next(), plain.next());
}

TEST(Prefetch, EndsAtAnyMoment) {
  Draw draw(test_seed());
  for (int i = 0; i < 200; ++i) {
    const Numbers data{100};
    if (draw.chance(30)) *data.broken = draw.below(100);
    auto ahead = prefetch(numbers(data), {.depth = 1 + draw.below(6), .workers = 1 + draw.below(4)});
    const auto batches = draw.below(8);
    try {
      for (int64_t given = 0; given < batches; ++given) std::ignore = ahead.next();
    } catch (const std::runtime_error&) {
    }
  }
}

/// Gives a batch when it is told to, and not before.
struct Gate {
  std::mutex mutex;
  std::condition_variable changed;
  int64_t allowed = 0;

  void allow(int64_t batches) {
    const std::lock_guard lock(mutex);
    allowed += batches;
    changed.notify_all();
  }
};
struct Gated {
  std::shared_ptr<Gate> gate;
  int64_t given = 0;

  std::optional<int64_t> next() {
    std::unique_lock lock(gate->mutex);
    gate->changed.wait(lock, [&] { return gate->allowed > 0; });
    --gate->allowed;
    return given++;
  }
  DataPosition position() const { return {0, given}; }
  void seek(const DataPosition& to) { given = to.row; }
};

TEST(Prefetch, WaitsAtItsEndForTheBatchThatIsRead) {
  const auto gate = std::make_shared<Gate>();
  std::thread opener;
  {
    auto ahead = prefetch(Gated{gate}, {.depth = 4});
    gate->allow(1);
    EXPECT_EQ(ahead.next(), 0);
    opener = std::thread([&] { gate->allow(100); }); // more than it reads ahead
  }
  opener.join();
}

/// A child of `fork` has the object without its threads.
TEST(Prefetch, EndsInAForkWithoutItsThreads) {
  if (world_size() > 1) GTEST_SKIP() << "a fork of a rank would have its connections";
  auto ahead = std::make_unique<Prefetched<RowSource<Numbers>>>(numbers({500}), PrefetchOptions{.depth = 4, .workers = 2});
  EXPECT_TRUE(ahead->next());
  EXPECT_EQ(run_in_child([&] {
              ahead.reset();
              return 7;
            }),
            7);
  EXPECT_TRUE(ahead->next());
}

TEST(Prefetch, NamesWhatIsWrong) {
  EXPECT_THROWS_WITH(prefetch(Stream{}, {.depth = 0}), "prefetch: a depth of 0 batches");
  EXPECT_THROWS_WITH(prefetch(Stream{}, {.workers = 0}), "prefetch: 0 workers");
  EXPECT_THROWS_WITH(prefetch(Stream{}, {.workers = 2}), "2 workers for a source that gives one batch after the other");
}

} // namespace
} // namespace tessera::testing::prefetch_test
