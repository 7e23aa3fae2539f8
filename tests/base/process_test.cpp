// What belongs to a process: its descriptors, its forks, the scheduling of its threads, calls with a limit of time.
#include <gtest/gtest.h>

#include <fcntl.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <future>
#include <memory>

#include <tessera/base/background_scheduling.h>
#include <tessera/base/descriptors.h>
#include <tessera/base/forks.h>
#include <tessera/base/time_limit.h>

#include <tessera/tests/support/matchers.h>

namespace tessera::testing::process_test {
namespace {

namespace descriptors = internal::gloo;

/// The exit status of a child that runs `act`, and ends with what it returns.
template <typename Act>
int in_a_child(const Act& act) {
  const pid_t child = fork();
  if (child == 0) _exit(act());
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

class SocketPair {
 public:
  SocketPair() { EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends_.data()), 0); }
  ~SocketPair() {
    for (const int end : ends_) {
      if (end >= 0) close(end);
    }
  }
  SocketPair(const SocketPair&) = delete;
  SocketPair& operator=(const SocketPair&) = delete;

  int operator[](size_t end) const { return ends_[end]; }
  void close_end(size_t end) { close(std::exchange(ends_[end], -1)); }

 private:
  std::array<int, 2> ends_{-1, -1};
};

TEST(OpenedDescriptors, MarksThoseForCommunicationThatWereOpenedSince) {
  const SocketPair earlier;
  const descriptors::OpenedDescriptors opened;
  const SocketPair later;
  const int file = open("/proc/self/status", O_RDONLY);
  const auto sockets = opened.close_on_exec();
  EXPECT_EQ(sockets.size(), 2);
  for (const size_t end : {0, 1}) {
    EXPECT_EQ(fcntl(earlier[end], F_GETFD) & FD_CLOEXEC, 0);
    EXPECT_EQ(fcntl(later[end], F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  }
  EXPECT_EQ(fcntl(file, F_GETFD) & FD_CLOEXEC, 0);
  close(file);
}

TEST(OpenedDescriptors, TellWhetherSomethingIsUnread) {
  const descriptors::OpenedDescriptors opened;
  SocketPair pair;
  const auto sockets = opened.close_on_exec();
  EXPECT_FALSE(descriptors::any_is_unread(sockets));
  ASSERT_EQ(write(pair[0], "x", 1), 1);
  EXPECT_TRUE(descriptors::any_is_unread(sockets));
  char byte = 0;
  ASSERT_EQ(read(pair[1], &byte, 1), 1);
  EXPECT_FALSE(descriptors::any_is_unread(sockets));
  pair.close_end(0); // its end is something to read for the other one
  EXPECT_TRUE(descriptors::any_is_unread(sockets));
  pair.close_end(1);
  const SocketPair others; // they may have the numbers of the closed ones
  ASSERT_EQ(write(others[0], "x", 1), 1);
  EXPECT_FALSE(descriptors::any_is_unread(sockets));
}

TEST(ReserveDescriptors, RaisesTheSoftLimit) {
  EXPECT_EQ(in_a_child([] {
              rlimit limit{64, 4096};
              if (setrlimit(RLIMIT_NOFILE, &limit) != 0) return 1;
              descriptors::reserve_descriptors(200);
              if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur < 200) return 2;
              const auto before = limit.rlim_cur;
              if (!descriptors::raise_descriptor_limit()) return 3;
              if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur != 2 * before) return 4;
              while (descriptors::raise_descriptor_limit()) {
              }
              if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur != 4096) return 5;
              return 0;
            }),
            0);
}

TEST(ReserveDescriptors, NamesTheNumbersWhereTheHardLimitIsTooLow) {
  EXPECT_EQ(in_a_child([] {
              const rlimit limit{64, 64};
              if (setrlimit(RLIMIT_NOFILE, &limit) != 0) return 1;
              const auto error = error_of([] { descriptors::reserve_descriptors(200); });
              const bool names = error.find("needs 200 more file descriptors") != std::string::npos &&
                                 error.find("of at most 64") != std::string::npos && error.find("ulimit -n") != std::string::npos;
              return names ? 0 : 2;
            }),
            0);
}

TEST(Forks, AreCounted) {
  const int depth = internal::fork_depth();
  EXPECT_EQ(in_a_child([depth] {
              if (internal::fork_depth() != depth + 1) return 1;
              return in_a_child([depth] { return internal::fork_depth() == depth + 2 ? 0 : 2; });
            }),
            0);
  EXPECT_EQ(internal::fork_depth(), depth);
}

TEST(Forks, WhatIsLeftToTheParentIsKept) {
  const auto value = std::make_shared<int>(1);
  internal::leave_to_parent(value);
  EXPECT_EQ(value.use_count(), 2);
}

TEST(BackgroundScheduling, HoldsForAScope) {
  const int before = sched_getscheduler(0);
  {
    const internal::BackgroundScheduling background;
    EXPECT_EQ(sched_getscheduler(0), before == SCHED_OTHER ? SCHED_BATCH : before);
    const internal::BackgroundScheduling within; // it finds another policy than the default one, and leaves it
    EXPECT_EQ(std::async(std::launch::async, [] { return sched_getscheduler(0); }).get(), sched_getscheduler(0));
  }
  EXPECT_EQ(sched_getscheduler(0), before);
}

TEST(TimeLimit, GivesWhatTheCallGives) {
  EXPECT_EQ(internal::within<int>(std::chrono::minutes(10), [] { return 3; }), 3);
  EXPECT_EQ(error_of([] { internal::within<int>(std::chrono::minutes(10), []() -> int { throw std::runtime_error("why"); }); }),
            "why");
}

TEST(TimeLimit, LeavesACallThatTakesTooLong) {
  const auto ends = std::make_shared<std::promise<void>>();
  const auto waits = [ended = ends->get_future().share(), ends] {
    ended.wait();
    return 1;
  };
  EXPECT_EQ(internal::within<int>(std::chrono::milliseconds(1), waits), std::nullopt);
  EXPECT_EQ(internal::within<int>(std::chrono::minutes(10), waits, [] { return true; }), std::nullopt);
  ends->set_value();
}

} // namespace
} // namespace tessera::testing::process_test
