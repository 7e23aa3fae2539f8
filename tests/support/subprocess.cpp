#include "subprocess.h"

#include <c10/util/Exception.h>

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <climits>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "forked_programs.h"
#include "spawn_program.h"

namespace tessera::testing {

namespace {

using Clock = std::chrono::steady_clock;

ProcessRequest request_of(const std::vector<std::string>& arguments, const std::vector<std::string>& variables, int output,
                          Start start) {
  auto request = request_of_this_process();
  request.arguments = arguments;
  request.variables = variables;
  request.descriptors[STDOUT_FILENO] = request.descriptors[STDERR_FILENO] = output;
  request.is_session = start == Start::kForkedAsSession;
  return request;
}

pid_t start_program(std::vector<std::string> arguments, const std::vector<std::string>& variables, int output, Start start,
                    bool is_forked) {
  if (is_forked) return fork_program(request_of(arguments, variables, output, start));
  if (start == Start::kForkedAsSession) arguments.insert(arguments.begin(), "setsid");
  return spawn_program(arguments, variables, {{STDOUT_FILENO, output}, {STDERR_FILENO, output}});
}

// Living children of this process, orphans of the program among them (this process is their subreaper).
std::vector<int> children() {
  std::vector<int> pids;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const auto name = entry.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    std::ifstream file(entry.path() / "stat");
    std::string line;
    std::getline(file, line);
    const auto end_of_name = line.rfind(')');
    if (end_of_name == std::string::npos) continue;
    std::istringstream rest(line.substr(end_of_name + 1));
    char state = 0;
    int parent = 0;
    rest >> state >> parent;
    if (parent == getpid() && state != 'Z') pids.push_back(std::stoi(name));
  }
  return pids;
}

// Reads until the program's end of the pipe is closed by all who hold it, or until `deadline`.
std::string read_all(int pipe, Clock::time_point deadline) {
  std::string output;
  char buffer[4096];
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd poll_pipe{pipe, POLLIN, 0};
    if (left <= 0 || poll(&poll_pipe, 1, static_cast<int>(left)) <= 0) return output;
    const auto count = read(pipe, buffer, sizeof(buffer));
    if (count <= 0) return output;
    output.append(buffer, count);
  }
}

// A signal that ends descendants (PR_SET_PDEATHSIG) works a moment after the program's end.
constexpr int kMomentInMilliseconds = 5000;

// Reaps those of `pids` that end within a moment, kills the others and returns them.
std::vector<int> kill_those_left(const std::vector<int>& pids) {
  std::vector<int> left;
  for (const int pid : pids) {
    const int descriptor = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
    pollfd ended{descriptor, POLLIN, 0};
    if (descriptor >= 0 && poll(&ended, 1, kMomentInMilliseconds) == 0) {
      left.push_back(pid);
      kill(pid, SIGKILL);
    }
    if (descriptor >= 0) close(descriptor);
    waitpid(pid, nullptr, 0);
  }
  return left;
}

} // namespace

ProgramResult run_program(const std::vector<std::string>& arguments, const std::map<std::string, std::string>& environment,
                          std::chrono::seconds timeout, Start start) {
  const auto variables = variables_of_child(environment);
  const bool is_forked = start != Start::kExecuted && may_be_forked(arguments.at(0), variables);
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  const auto before = children();
  const auto end = Clock::now() + timeout;
  int ends[2];
  TORCH_CHECK(pipe2(ends, O_CLOEXEC) == 0, "cannot make a pipe");
  const pid_t pid = start_program(arguments, variables, ends[1], start, is_forked);
  close(ends[1]);
  ProgramResult result;
  // Descendants may hold the pipe longer than the program lives: read in steps until it has ended.
  int status = 0;
  while (waitpid(pid, &status, WNOHANG) == 0) {
    if (Clock::now() > end) {
      result.timed_out = true;
      kill(pid, SIGKILL);
      waitpid(pid, &status, 0);
      break;
    }
    result.output += read_all(ends[0], std::min(end, Clock::now() + std::chrono::milliseconds(100)));
  }
  result.status = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  auto remaining = children();
  std::erase_if(remaining, [&](int child) { return std::find(before.begin(), before.end(), child) != before.end(); });
  result.left_behind = kill_those_left(remaining);
  result.output += read_all(ends[0], Clock::now() + std::chrono::seconds(1));
  close(ends[0]);
  return result;
}

std::string program_folder() { return std::filesystem::read_symlink("/proc/self/exe").parent_path().string(); }

} // namespace tessera::testing
