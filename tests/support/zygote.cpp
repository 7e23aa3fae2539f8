#include "zygote.h"

#include <c10/util/Exception.h>

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

#include "sanitized.h"

namespace tessera::testing {

namespace {

struct Pipe {
  Pipe() { TORCH_CHECK(pipe2(ends, O_CLOEXEC) == 0, "cannot make a pipe: ", std::strerror(errno)); }
  ~Pipe() {
    close_end(0);
    close_end(1);
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;

  void close_end(int end) {
    if (ends[end] >= 0) close(std::exchange(ends[end], -1));
  }

  int ends[2];
};

void check_has_one_thread() {
  if (kIsSanitized) return; // a sanitizer may have one of its own
  int threads = 0;
  for ([[maybe_unused]] const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) ++threads;
  TORCH_CHECK(threads == 1, "a zygote has ", threads, " threads, of which its forks have one");
}

/// Two forks, of which the first ends at once: the second goes to the process above that adopts orphans, which is the one that
/// asked. Returns 0 in it once it has been adopted, and its pid here, or the negative number of an error.
pid_t fork_an_orphan() {
  Pipe told, adopted;
  const pid_t between = fork();
  if (between < 0) return -errno;
  if (between == 0) {
    const pid_t orphan = fork();
    const pid_t result = orphan < 0 ? -errno : orphan;
    if (orphan != 0) _exit(write(told.ends[1], &result, sizeof(result)) == sizeof(result) ? 0 : 1);
    adopted.close_end(1);
    char end = 0;
    while (read(adopted.ends[0], &end, 1) < 0 && errno == EINTR) continue; // until the other process has closed its end
    return 0;
  }
  pid_t orphan = 0;
  while (waitpid(between, nullptr, 0) < 0 && errno == EINTR) continue;
  told.close_end(1);
  return read(told.ends[0], &orphan, sizeof(orphan)) == sizeof(orphan) ? orphan : -ECHILD;
}

} // namespace

ProcessRequest serve_as_zygote(int connection) {
  check_has_one_thread();
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  std::signal(SIGCHLD, SIG_DFL);
  ProcessRequest request;
  while (receive_request(connection, request)) {
    const pid_t pid = fork_an_orphan();
    if (pid == 0) {
      become(request);
      return request;
    }
    for (const auto& [number, received] : request.descriptors) close(received);
    if (send(connection, &pid, sizeof(pid), MSG_NOSIGNAL) < 0) break;
  }
  _exit(0);
}

pid_t fork_from_zygote(int connection, const ProcessRequest& request) {
  int adopts = 0;
  prctl(PR_GET_CHILD_SUBREAPER, &adopts);
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  send_request(connection, request);
  pid_t pid = 0;
  const auto count = recv(connection, &pid, sizeof(pid), 0);
  prctl(PR_SET_CHILD_SUBREAPER, adopts);
  TORCH_CHECK(count == sizeof(pid), "a zygote has ended before it forked");
  TORCH_CHECK(pid > 0, "a zygote cannot fork: ", std::strerror(-pid));
  return pid;
}

ZygoteConnection connect_zygote() {
  int ends[2];
  TORCH_CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0,
              "cannot make a connection: ", std::strerror(errno));
  return {ends[0], ends[1]};
}

} // namespace tessera::testing
