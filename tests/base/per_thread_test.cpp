// What each thread has of its own: made once, seen by nobody else, destroyed when the thread ends.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <tessera/base/per_thread.h>

#include <tessera/tests/support/matchers.h>

namespace tessera::testing::per_thread_test {
namespace {

using internal::PerThread, internal::ScopedValue;

template <typename Function>
void on_another_thread(const Function& function) {
  std::thread(function).join();
}

struct Counter {
  int count = 3;
};
constinit PerThread<Counter> counter;

TEST(PerThread, HasAValueOfItsOwnOnEachThread) {
  counter->count = 7;
  on_another_thread([] {
    EXPECT_EQ(counter->count, 3);
    counter->count = 5;
    EXPECT_EQ(counter->count, 5);
  });
  EXPECT_EQ(counter->count, 7);
  EXPECT_EQ(&*counter, &*counter);
  counter->count = 3;
}

std::vector<std::string>* ended = nullptr; // the names of values that were destroyed, in their order

template <int number>
struct Ends {
  Ends() = default;
  ~Ends() {
    if (ended) ended->push_back(std::to_string(number));
  }
  Ends(const Ends&) = delete;
  Ends& operator=(const Ends&) = delete;
};
constinit PerThread<Ends<1>> first;
constinit PerThread<Ends<2>> second;

TEST(PerThread, EndsWithItsThreadTheLastFirst) {
  std::vector<std::string> names;
  ended = &names;
  on_another_thread([&] {
    static_cast<void>(*first);
    static_cast<void>(*second);
    EXPECT_TRUE(names.empty());
  });
  EXPECT_EQ(names, (std::vector<std::string>{"2", "1"}));
  on_another_thread([] {}); // which has asked for none
  EXPECT_EQ(names.size(), 2u);
  ended = nullptr;
}

struct AsksForAnother {
  AsksForAnother() { counter->count += 10; }
};
constinit PerThread<AsksForAnother> asking;

TEST(PerThread, MayAskForAnotherAsItIsMade) {
  on_another_thread([] {
    static_cast<void>(*asking);
    EXPECT_EQ(counter->count, 13);
  });
}

int seen_at_the_end = 0;

/// It is destroyed after all that its thread had.
struct AsksAtTheEnd {
  ~AsksAtTheEnd() {
    const std::unique_ptr<Counter> late(&*counter); // nobody else destroys it
    seen_at_the_end = late->count;
  }
};

TEST(PerThread, MayBeAskedAsItsThreadEnds) {
  on_another_thread([] {
    thread_local const AsksAtTheEnd asks;
    static_cast<void>(&asks);
    counter->count = 8;
  });
  EXPECT_EQ(seen_at_the_end, 3);
}

TEST(PerThread, IsAskedByManyThreadsFirstAtOnce) {
  static constinit PerThread<Counter> fresh;
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([i] {
      EXPECT_EQ(fresh->count, 3);
      fresh->count = i;
      std::this_thread::yield();
      EXPECT_EQ(fresh->count, i);
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(ScopedValue, IsThereInItsScope) {
  std::string place = "before";
  {
    const ScopedValue<std::string> outer(place, "outer");
    EXPECT_EQ(place, "outer");
    EXPECT_EQ(outer.before(), "before");
    EXPECT_THROWS_WITH(
        {
          const ScopedValue<std::string> inner(place, "inner");
          EXPECT_EQ(place, "inner");
          throw std::runtime_error("ends it too");
        },
        "ends it too");
    EXPECT_EQ(place, "outer");
  }
  EXPECT_EQ(place, "before");
}

} // namespace
} // namespace tessera::testing::per_thread_test
