#include "forked_ranks.h"

#include "quick_end.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <tessera/collectives/ranks/rank_watch.h>
#include <tessera/collectives/ranks/store_socket.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace tessera::testing {

namespace {

constexpr std::chrono::seconds kGrace(2);

/// As `launch` sets it.
void describe_rank(int rank, int ranks, uint16_t port) {
  const auto set = [](const char* name, const std::string& value) { setenv(name, value.c_str(), 1); };
  for (const char* name : {"RANK", "LOCAL_RANK"}) set(name, std::to_string(rank));
  for (const char* name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE"}) set(name, std::to_string(ranks));
  set("MASTER_ADDR", "127.0.0.1");
  set("MASTER_PORT", std::to_string(port));
  set("TORCHELASTIC_USE_AGENT_STORE", "True");
  unsetenv("TORCHELASTIC_RESTART_COUNT");
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  if (std::getenv("OMP_NUM_THREADS") == nullptr) at::set_num_threads(std::max(1, cores / ranks));
}

/// The children, as their parent sees them.
class Children {
 public:
  Children(std::vector<pid_t> pids, c10d::Store& store) : pids_(std::move(pids)), running_(pids_.size()), store_(store) {}

  int wait() {
    while (running_ > 0 && !has_failed_) note_end(/*options=*/0);
    const auto end = std::chrono::steady_clock::now() + kGrace;
    while (running_ > 0 && std::chrono::steady_clock::now() < end) {
      if (!note_end(WNOHANG)) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    for (const pid_t pid : pids_) {
      if (pid != 0) kill(pid, SIGKILL);
    }
    while (running_ > 0) note_end(0);
    return has_failed_ ? 1 : 0;
  }

 private:
  /// Whether a child has ended.
  bool note_end(int options) {
    int status = 0;
    const auto found = std::find(pids_.begin(), pids_.end(), waitpid(-1, &status, options));
    if (found == pids_.end()) return false;
    const auto rank = found - pids_.begin();
    *found = 0;
    --running_;
    if (status != 0 && !std::exchange(has_failed_, true)) {
      const auto how = WIFSIGNALED(status) ? c10::str("was killed by signal ", WTERMSIG(status))
                                           : c10::str("exited with status ", WEXITSTATUS(status));
      std::fprintf(stderr, "rank %d of %zu %s\n", static_cast<int>(rank), pids_.size(), how.c_str());
    }
    try {
      internal::add_ended_rank(store_, rank);
    } catch (const std::exception&) { // those that wait for it learn of it at their timeout
    }
    return true;
  }

  std::vector<pid_t> pids_; ///< 0 once it has ended
  size_t running_;
  c10d::Store& store_;
  bool has_failed_ = false;
};

/// Starts a fork of this process, which does the work and ends with this process.
pid_t start_child(const std::function<int()>& work) {
  std::fflush(nullptr); // or the child would write it too
  const pid_t parent = getpid(), pid = fork();
  TORCH_CHECK(pid >= 0, "cannot fork");
  if (pid != 0) return pid;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) std::_Exit(1);
  end_without_unloading();
  std::exit(work());
}

} // namespace

int run_forked_ranks(int ranks, const std::function<int()>& worker) {
  const auto socket = internal::listen_for_store("127.0.0.1", 0, internal::StoreReach::kThisHost).value();
  std::vector<pid_t> pids;
  for (int rank = 0; rank < ranks; ++rank) {
    pids.push_back(start_child([&] {
      close(socket.descriptor);
      describe_rank(rank, ranks, socket.port);
      return worker();
    }));
  }
  c10d::TCPStore store(
      "127.0.0.1",
      c10d::TCPStoreOptions{.port = socket.port, .isServer = true, .waitWorkers = false, .masterListenFd = socket.descriptor});
  return Children(std::move(pids), store).wait();
}

int run_in_child(const std::function<int()>& work) {
  const pid_t pid = start_child(work);
  int status = 0;
  while (waitpid(pid, &status, 0) < 0) TORCH_CHECK(errno == EINTR, "cannot wait for a child");
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

} // namespace tessera::testing
