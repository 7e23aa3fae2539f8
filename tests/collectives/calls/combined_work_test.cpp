#include <tessera/collectives/calls/combined_work.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include <tessera/tests/support/matchers.h>

namespace tessera::internal::combined_work_test {
namespace {

struct CountedWork final : WorkState {
  void wait() override {
    ++waits;
    if (fails) throw std::runtime_error("out of luck");
  }
  bool is_completed() override { return waits > 0; }
  bool blocks_host() const override { return blocks; }

  std::atomic<int> waits{0};
  bool fails = false, blocks = true;
};

std::vector<std::shared_ptr<CountedWork>> two() { return {std::make_shared<CountedWork>(), std::make_shared<CountedWork>()}; }

// On a device a wait is one of the current stream, which another stream has not done.
TEST(CombinedWork, EachCopyWaitsForAll) {
  const auto parts = two();
  auto first = combine({Work(parts[0]), Work(parts[1])}), second = first;
  EXPECT_FALSE(first.is_completed());
  first.wait();
  EXPECT_TRUE(second.is_completed());
  second.wait();
  first.wait(); // a second wait of one handle returns at once
  for (const auto& part : parts) EXPECT_EQ(part->waits, 2);
}

TEST(CombinedWork, AFailureIsOneOfEachCopy) {
  const auto parts = two();
  parts[1]->fails = true;
  auto first = combine({Work(parts[0]), Work(parts[1])}), second = first;
  for (auto* work : {&first, &first, &second}) EXPECT_THROWS_WITH(work->wait(), "out of luck");
}

TEST(CombinedWork, BlocksTheHostWhereOneOfItsPartsDoes) {
  const auto parts = two();
  parts[0]->blocks = false;
  EXPECT_TRUE(combine({Work(parts[0]), Work(parts[1])}).blocks_host());
  parts[1]->blocks = false;
  EXPECT_FALSE(combine({Work(parts[0]), Work(parts[1])}).blocks_host());
  EXPECT_FALSE(combine({}).blocks_host());
  EXPECT_TRUE(combine({}).is_completed());
}

TEST(CombinedWork, IsPolledWhileAnotherThreadWaits) {
  for (int time = 0; time < 100; ++time) {
    const auto parts = two();
    auto work = combine({Work(parts[0]), Work(parts[1])});
    std::thread other([copy = work]() mutable { copy.wait(); });
    while (!work.is_completed()) std::this_thread::yield();
    other.join();
  }
}

} // namespace
} // namespace tessera::internal::combined_work_test
