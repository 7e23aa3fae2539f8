// The lock of a model: one thread has it, once, except where a function of the program runs under it.
#include <gtest/gtest.h>

#include <tessera/fsdp/group/model_lock.h>

#include <atomic>
#include <thread>
#include <vector>

#include <tessera/tests/support/matchers.h>

namespace tessera::testing::model_lock_test {
namespace {

using internal::Guarded;
using internal::ModelLock;
using internal::ModelMutex;
using internal::ProgramCall;

TEST(ModelLock, IsHeldByOneThread) {
  ModelMutex mutex;
  Guarded<int64_t> count(0);
  constexpr int64_t kThreads = 4, kTimes = 10'000;
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int64_t time = 0; time < kTimes; ++time) {
        const ModelLock lock(mutex);
        ++count.get(lock);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(count.unshared(), kThreads * kTimes);
}

TEST(ModelLock, TakenTwiceIsAnErrorThatLeavesItHeld) {
  ModelMutex mutex;
  EXPECT_THROWS_WITH(mutex.held(), "the lock of a model is not held");
  {
    const ModelLock lock(mutex);
    EXPECT_NO_THROW(mutex.held());
    EXPECT_THROWS_WITH(const ModelLock again(mutex), "the lock of a model is taken twice");
    EXPECT_NO_THROW(mutex.held());
  }
  EXPECT_THROWS_WITH(mutex.held(), "the lock of a model is not held");
  EXPECT_NO_THROW(const ModelLock lock(mutex));
}

TEST(ModelLock, IsTakenAgainByAFunctionOfTheProgramThatItsThreadCalls) {
  ModelMutex mutex;
  const ModelLock lock(mutex);
  EXPECT_EQ(lock.program(), nullptr);
  {
    const ProgramCall hook(mutex, "a hook");
    for (int i = 0; i < 2; ++i) {
      const ModelLock inner(mutex);
      EXPECT_THROWS_WITH(const ModelLock twice(mutex), "is taken twice");
      const ProgramCall hook_of_hook(mutex, "a hook of the hook");
      const ModelLock innermost(mutex);
      EXPECT_STREQ(inner.program(), "a hook");
      EXPECT_STREQ(innermost.program(), "a hook of the hook");
    }
    EXPECT_NO_THROW(mutex.held());
  }
  EXPECT_THROWS_WITH(const ModelLock again(mutex), "is taken twice");
}

/// A hook's thread has no part in the lock: it waits, until the hook's own thread gives it up.
TEST(ModelLock, IsNotTakenByAnotherThreadDuringAFunctionOfTheProgram) {
  ModelMutex mutex;
  std::atomic<bool> has_begun = false, is_given_up = false, was_given_up = false;
  std::thread other;
  {
    const ModelLock lock(mutex);
    const ProgramCall hook(mutex, "a hook");
    other = std::thread([&] {
      const ProgramCall nothing(mutex, "a hook"); // of a thread that does not have it
      has_begun = true;
      const ModelLock own(mutex);
      was_given_up = is_given_up.load();
    });
    while (!has_begun) std::this_thread::yield();
    is_given_up = true;
  }
  other.join();
  EXPECT_TRUE(was_given_up);
}

} // namespace
} // namespace tessera::testing::model_lock_test
