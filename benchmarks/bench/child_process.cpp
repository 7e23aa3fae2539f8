#include "child_process.h"

#include <c10/util/Exception.h>

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <fstream>
#include <sstream>

namespace tessera::benchmarks {
namespace {

using Clock = std::chrono::steady_clock;

/// In the child, between fork and exec.
[[noreturn]] void become(char* const* arguments, char* const* variables, const char* output, const char* errors, pid_t parent) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1); // it went before this
  const int out = open(output, O_WRONLY | O_CREAT | O_TRUNC, 0600), err = open(errors, O_WRONLY | O_CREAT | O_TRUNC, 0600);
  if (out < 0 || err < 0) _exit(1);
  dup2(out, STDOUT_FILENO);
  dup2(err, STDERR_FILENO);
  execve("/proc/self/exe", arguments, variables);
  _exit(127);
}

/// Whether the process ended before `end`.
bool ends_before(pid_t pid, Clock::time_point end) {
  const int descriptor = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  TORCH_CHECK(descriptor >= 0, "cannot watch process ", pid, ": ", std::strerror(errno));
  pollfd ended{descriptor, POLLIN, 0};
  int ready = 0;
  do {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now()).count();
    ready = poll(&ended, 1, static_cast<int>(std::max<int64_t>(left, 0)));
  } while (ready < 0 && errno == EINTR);
  close(descriptor);
  return ready > 0;
}

std::vector<char*> pointers_to(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (auto& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

/// This process's environment, with `variables` in place of those of their names.
std::vector<std::string> environment_with(const std::vector<std::pair<std::string, std::string>>& variables) {
  std::vector<std::string> all;
  for (char** entry = environ; *entry; ++entry) {
    const std::string text(*entry);
    const auto is_of = [&](const auto& variable) { return text.starts_with(variable.first + "="); };
    if (std::none_of(variables.begin(), variables.end(), is_of)) all.push_back(text);
  }
  for (const auto& [name, value] : variables) all.push_back(name + "=" + value);
  return all;
}

} // namespace

std::string content_of(const std::filesystem::path& file) {
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  return text.str();
}

Ended run_again(const std::vector<std::string>& arguments, const std::vector<std::pair<std::string, std::string>>& variables,
                double seconds, const std::filesystem::path& folder) {
  const auto output = folder / "output", errors = folder / "errors";
  auto words = arguments, environment = environment_with(variables);
  const auto pointers = pointers_to(words), settings = pointers_to(environment);
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  const pid_t self = getpid(), pid = fork();
  TORCH_CHECK(pid >= 0, "cannot start a process: ", std::strerror(errno));
  if (pid == 0) become(pointers.data(), settings.data(), output.c_str(), errors.c_str(), self);
  const bool in_time = ends_before(pid, end);
  kill(-pid, SIGKILL); // what it left, too
  int status = 0;
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  Ended ended{.errors = content_of(errors)};
  ended.how = !in_time ? Ended::How::kTimeLimit : WIFSIGNALED(status) ? Ended::How::kSignal : Ended::How::kExit;
  ended.code = WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status);
  return ended;
}

} // namespace tessera::benchmarks
