#include "child_process.h"

#include <c10/util/Exception.h>

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

namespace tessera::benchmarks {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kParentVariable = "TESSERA_BENCH_PARENT"; // the pid of the process that started a case

/// A file to write to, closed when this object goes.
class Output {
 public:
  explicit Output(const std::filesystem::path& file)
      : descriptor_(open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600)) {
    TORCH_CHECK(descriptor_ >= 0, file.string(), ": cannot be written: ", std::strerror(errno));
  }
  ~Output() { close(descriptor_); }
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  int descriptor() const { return descriptor_; }

 private:
  int descriptor_;
};

/// Starts this program, as the leader of a group of processes.
pid_t start(char* const* arguments, char* const* variables, const Output& output, const Output& errors) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, output.descriptor(), STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, errors.descriptor(), STDERR_FILENO);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  pid_t pid = 0;
  const int error = posix_spawn(&pid, "/proc/self/exe", &actions, &attributes, arguments, variables);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  TORCH_CHECK(error == 0, "cannot start a process: ", std::strerror(error));
  return pid;
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

void end_with_parent() {
  const char* const parent = std::getenv(kParentVariable);
  if (parent == nullptr) return; // a rank, which ends with its case
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (std::to_string(getppid()) != parent) _exit(1); // it went before this
  unsetenv(kParentVariable);
}

Ended run_again(const std::vector<std::string>& arguments, const std::vector<std::pair<std::string, std::string>>& variables,
                double seconds, const std::filesystem::path& folder) {
  auto with_parent = variables;
  with_parent.emplace_back(kParentVariable, std::to_string(getpid()));
  auto words = arguments, environment = environment_with(with_parent);
  const auto pointers = pointers_to(words), settings = pointers_to(environment);
  const auto errors = folder / "errors";
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  const pid_t pid = start(pointers.data(), settings.data(), Output(folder / "output"), Output(errors));
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
