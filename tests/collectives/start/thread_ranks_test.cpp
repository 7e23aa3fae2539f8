#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sanitized.h>
#include <tessera/tests/support/scoped_environment.h>

#include <tessera/collectives/process_context.h>
#include <tessera/collectives/run_ranks.h>
#include <tessera/mesh/device_mesh.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>
#include <atomic>
#include <fstream>
#include <mutex>

namespace tessera::thread_ranks_test {
namespace {

CommunicatorPtr world() { return init_device_mesh(torch::kCPU, {process_context().world_size()}).communicator(); }
int own_rank() { return process_context().rank(); }

/// What `program` says in each rank when it fails.
std::vector<std::string> errors_of(int ranks, const std::function<void()>& program, const ProcessGroupOptions& options = {}) {
  std::vector<std::string> texts(static_cast<size_t>(ranks));
  run_ranks_as_threads(
      ranks,
      [&] {
        try {
          program();
        } catch (const c10::Error& error) {
          texts[static_cast<size_t>(own_rank())] = error.what_without_backtrace();
        }
      },
      options);
  return texts;
}

TEST(ThreadRanks, EachThreadIsARankOfItsOwn) {
  const auto outer = own_rank(), outer_size = process_context().world_size();
  std::atomic<int> seen{0};
  run_ranks_as_threads(4, [&] {
    EXPECT_EQ(process_context().world_size(), 4);
    EXPECT_EQ(process_context().local_rank(), own_rank());
    seen += 1 << own_rank();
    EXPECT_THROWS_WITH(init_process_group(), "called already");
    EXPECT_THROWS_WITH(destroy_process_group(), "that of ranks in threads ends with run_ranks_as_threads");
  });
  EXPECT_EQ(seen, 0b1111);
  EXPECT_EQ(own_rank(), outer) << "the process's own job is as it was";
  EXPECT_EQ(process_context().world_size(), outer_size);
}

TEST(ThreadRanks, CollectivesMoveRealData) {
  for (const int n : {1, 2, 3, 4}) {
    SCOPED_TRACE(n);
    run_ranks_as_threads(n, [n] {
      const auto group = world();
      const auto r = static_cast<float>(own_rank());
      auto all = torch::zeros({2 * n});
      group->all_gather_into(all, torch::tensor({r, r + 10}), "gather").wait();
      for (int other = 0; other < n; ++other)
        EXPECT_TENSORS_EQUAL(all.narrow(0, 2 * other, 2), torch::tensor({other + 0.0f, other + 10.0f}));
      auto part = torch::zeros({2});
      group->reduce_scatter(part, torch::full({2 * n}, r + 1), ReduceOp::kSum, "scatter").wait();
      EXPECT_TENSORS_EQUAL(part, torch::full({2}, static_cast<float>(n * (n + 1)) / 2));
      auto mean = torch::full({3}, r, torch::kHalf);
      group->all_reduce(mean, ReduceOp::kAvg, "mean").wait();
      EXPECT_TENSORS_EQUAL(mean, torch::full({3}, static_cast<float>(n - 1) / 2, torch::kHalf));
      auto received = torch::zeros({n}, torch::kLong);
      group->all_to_all(received, torch::full({n}, own_rank(), torch::kLong), {}, {}, "exchange").wait();
      EXPECT_TENSORS_EQUAL(received, torch::arange(n));
      auto sent = torch::full({1}, r);
      group->broadcast(sent, n - 1, "broadcast").wait();
      EXPECT_EQ(sent.item<float>(), static_cast<float>(n - 1));
      group->barrier("barrier");
    });
  }
}

TEST(ThreadRanks, MessagesGoBetweenTwo) {
  run_ranks_as_threads(3, [] {
    const auto group = world();
    if (own_rank() == 2) return;
    auto first = torch::full({2}, own_rank()), second = torch::zeros({2}, torch::kLong);
    auto sending = group->send(first, 1 - own_rank(), "m");
    group->receive(second, 1 - own_rank(), "m").wait();
    sending.wait();
    EXPECT_TENSORS_EQUAL(second, torch::full({2}, 1 - own_rank()));
  });
}

TEST(ThreadRanks, ASecondGroupRunsBesideTheFirst) {
  run_ranks_as_threads(2, [] {
    const auto mesh = init_device_mesh(torch::kCPU, {2});
    const auto a = mesh.communicator(0, "a"), b = mesh.communicator(0, "b");
    auto x = torch::ones({1}), y = torch::ones({1});
    std::vector<Work> works;
    if (own_rank() == 0) { // in another order than rank 1
      works = {a->all_reduce(x, ReduceOp::kSum, "x"), b->all_reduce(y, ReduceOp::kSum, "y")};
    } else {
      works = {b->all_reduce(y, ReduceOp::kSum, "y"), a->all_reduce(x, ReduceOp::kSum, "x")};
    }
    for (auto& work : works) work.wait();
    EXPECT_EQ(x.item<float>() + y.item<float>(), 4);
  });
}

TEST(ThreadRanks, AMismatchIsAnErrorOnEveryRank) {
  const auto texts = errors_of(2, [] {
    const auto group = world();
    auto tensor = torch::ones({own_rank() + 1});
    group->all_reduce(tensor, ReduceOp::kSum, "loss").wait();
  });
  for (const auto& text : texts) {
    EXPECT_THAT(text, ::testing::HasSubstr("the ranks called different collectives:"));
    EXPECT_THAT(text, ::testing::HasSubstr("rank 0: all_reduce 'loss' (4 bytes of Float, sum, call 0)"));
    EXPECT_THAT(text, ::testing::HasSubstr("rank 1: all_reduce 'loss' (8 bytes of Float, sum, call 0)"));
  }
}

TEST(ThreadRanks, ARankThatThrowsEndsTheOthers) {
  std::mutex mutex;
  std::vector<std::string> others;
  const auto program = [&] {
    const auto group = world();
    if (own_rank() == 2) throw std::runtime_error("out of luck");
    try {
      group->barrier("step");
    } catch (const c10::Error& error) {
      const std::lock_guard lock(mutex);
      others.emplace_back(error.what_without_backtrace());
      throw;
    }
  };
  EXPECT_THROWS_WITH(run_ranks_as_threads(4, program), "run_ranks_as_threads: rank 2 of 4 threw: out of luck");
  ASSERT_EQ(others.size(), 3u);
  for (const auto& text : others)
    EXPECT_THAT(text, ::testing::HasSubstr("barrier 'step' of group default [0, 1, 2, 3] on rank "));
  for (const auto& text : others) EXPECT_THAT(text, ::testing::HasSubstr("rank 2 has thrown: out of luck"));
}

/// While it lives, the process gets no more memory than for two of threads with a stack of this size.
class RoomForTwoThreads {
 public:
  RoomForTwoThreads() {
    pthread_attr_t large;
    pthread_attr_init(&large);
    pthread_getattr_default_np(&before_);
    pthread_attr_setstacksize(&large, kStack);
    pthread_setattr_default_np(&large);
    pthread_attr_destroy(&large);
    getrlimit(RLIMIT_AS, &limit_);
    size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const rlimit small{pages * static_cast<size_t>(sysconf(_SC_PAGESIZE)) + 5 * kStack / 2, limit_.rlim_max};
    setrlimit(RLIMIT_AS, &small);
  }
  ~RoomForTwoThreads() {
    setrlimit(RLIMIT_AS, &limit_);
    pthread_setattr_default_np(&before_);
    pthread_attr_destroy(&before_);
  }
  RoomForTwoThreads(const RoomForTwoThreads&) = delete;
  RoomForTwoThreads& operator=(const RoomForTwoThreads&) = delete;

 private:
  static constexpr size_t kStack = size_t{1} << 30;
  pthread_attr_t before_;
  rlimit limit_ = {};
};

TEST(ThreadRanks, ThreadsThatCannotBeStartedAreAnError) {
  if (testing::kIsSanitized) GTEST_SKIP() << "the sanitizer needs memory for each thread, and ends where it gets none";
  const auto run_four = [] {
    const RoomForTwoThreads room;
    run_ranks_as_threads(4, [] { world()->barrier("step"); });
  };
  EXPECT_THROWS_WITH(run_four(), " of 4 ranks could not be started: ");
}

TEST(ThreadRanks, WhoWaitsForARankThatReturnedGetsAnError) {
  const auto texts = errors_of(2, [] {
    const auto group = world();
    if (own_rank() == 0) group->barrier("end");
  });
  EXPECT_THAT(texts[0], ::testing::HasSubstr("barrier 'end' of group default [0, 1] on rank 0: rank 1 has returned"));
  EXPECT_EQ(texts[1], "");
}

TEST(ThreadRanks, ATimeoutSaysWhatTheOthersWaitFor) {
  const testing::ScopedEnvironment timeout("TESSERA_TIMEOUT_SECONDS", "1"); // it overrides the options
  const auto texts = errors_of(2,
                               [] {
                                 const auto mesh = init_device_mesh(torch::kCPU, {2});
                                 mesh.communicator(0, own_rank() == 0 ? "a" : "b")->barrier("step");
                               },
                               {.timeout = std::chrono::milliseconds(200)});
  bool named = false; // the first whose time is up names what the other waits in
  for (const auto& text : texts) {
    EXPECT_THAT(text, ::testing::HasSubstr("barrier 'step' of group "));
    named = named || text.find("timed out after 1000 ms, waiting for rank ") != std::string::npos;
  }
  EXPECT_TRUE(named);
}

TEST(ThreadRanks, BadArgumentsAreErrors) {
  EXPECT_THROWS_WITH(run_ranks_as_threads(0, [] {}), "run_ranks_as_threads: there are 0 ranks");
  EXPECT_THROWS_WITH(run_ranks_as_threads(1, nullptr), "the program is an empty function");
  EXPECT_THROWS_WITH(run_ranks_as_threads(1, [] {}, {.own_store = OwnStore{}}), "take no ProcessGroupOptions::own_store");
  const testing::ScopedEnvironment unset("TESSERA_TIMEOUT_SECONDS", "");
  EXPECT_THROWS_WITH(run_ranks_as_threads(1, [] {}, {.timeout = std::chrono::milliseconds(0)}), "timeout must be positive");
  EXPECT_THROWS_WITH(run_ranks_as_threads(2, [] { init_device_mesh(torch::kMeta, {2}); }), "tensors on meta");
}

} // namespace
} // namespace tessera::thread_ranks_test
