// Forks of programs that have been loaded once, for tests that are no C++.
//   forked_start --beside FOLDER PROGRAM... -- COMMAND...
//     It runs a test. A word of the command that is a program, a path in FOLDER, becomes a script that forks the program. A word
//     that is FOLDER, or a folder in it that has programs, becomes one that has these scripts.
//   forked_start SOCKET PROGRAM ARGUMENT...
//     It asks for the fork, and is to its parent what the program would be: it passes signals on, and ends alike. What cannot be
//     forked (`may_be_forked`) is executed.
// The fork is no descendant of the process in front of it. A test that needs it to be finds the first program in
// TESSERA_TEST_FORKED.
// A signal to a group of processes reaches the fork alone, and not what the fork has started.
#include <c10/util/Exception.h>

#include <poll.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "forked_programs.h"
#include "spawn_program.h"
#include "temporary_folder.h"

namespace {

using tessera::testing::ProcessRequest;

void check(bool holds, const char* what) { TORCH_CHECK(holds, "cannot ", what, ": ", std::strerror(errno)); }

int make_socket() {
  const int made = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  check(made >= 0, "make a socket");
  return made;
}

sockaddr_un address_of(std::string_view path) {
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  TORCH_CHECK(path.size() < sizeof(address.sun_path), "the socket's path is longer than ", sizeof(address.sun_path) - 1);
  path.copy(address.sun_path, path.size());
  return address;
}

template <typename T>
bool tell(int connection, const T& value) {
  return send(connection, &value, sizeof(value), MSG_NOSIGNAL) == sizeof(value);
}

template <typename T>
bool hear(int connection, T& value) {
  ssize_t count = 0;
  while ((count = recv(connection, &value, sizeof(value), 0)) < 0 && errno == EINTR) continue;
  return count == sizeof(value);
}

/// A program that runs for the one at the other end of `connection`.
struct Running {
  pid_t pid;
  int connection;
  int ended; ///< readable once it has
};

/// Says the pid of the fork, or 0 where the program is to be executed.
void serve(int connection, std::vector<Running>& running) {
  ProcessRequest request;
  if (!tessera::testing::receive_request(connection, request)) {
    close(connection);
    return;
  }
  const bool is_forked = tessera::testing::may_be_forked(request.arguments.at(0), request.variables);
  const pid_t pid = is_forked ? tessera::testing::fork_program(request) : 0;
  for (const auto& [number, received] : request.descriptors) close(received);
  tell(connection, pid);
  if (is_forked)
    running.push_back({pid, connection, static_cast<int>(syscall(SYS_pidfd_open, pid, 0))});
  else
    close(connection);
}

/// Kills the program if nobody is left who asked for it.
void end(const Running& program, bool is_wanted) {
  if (!is_wanted) kill(program.pid, SIGKILL);
  int status = 0;
  waitpid(program.pid, &status, 0);
  tell(program.connection, status);
  close(program.connection);
  close(program.ended);
}

int listen_at(std::string_view path) {
  const int listening = make_socket();
  const auto address = address_of(path);
  check(bind(listening, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0, "bind the socket");
  check(listen(listening, SOMAXCONN) == 0, "listen at the socket");
  return listening;
}

/// Until the test has ended. The programs that it has left are killed.
void serve_all(int listening, int test_ended) {
  std::vector<Running> running;
  for (bool is_test_over = false; !is_test_over;) {
    std::vector<pollfd> awaited{{test_ended, POLLIN, 0}, {listening, POLLIN, 0}};
    for (const auto& one : running) {
      awaited.push_back({one.ended, POLLIN, 0});
      awaited.push_back({one.connection, 0, 0}); // for its hang-up
    }
    if (poll(awaited.data(), awaited.size(), -1) < 0) continue;
    is_test_over = awaited[0].revents != 0;
    for (size_t i = running.size(); i-- > 0;) {
      const bool has_ended = awaited[2 + 2 * i].revents != 0, is_wanted = awaited[3 + 2 * i].revents == 0 && !is_test_over;
      if (!has_ended && is_wanted) continue;
      end(running[i], has_ended);
      running.erase(running.begin() + static_cast<std::ptrdiff_t>(i));
    }
    if (awaited[1].revents != 0) serve(accept4(listening, nullptr, nullptr, SOCK_CLOEXEC), running);
  }
}

/// A script that forks the program.
void write_script(const std::filesystem::path& path, const std::string& socket, const std::string& program) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path) << "#!/bin/sh\nexec '" << std::filesystem::read_symlink("/proc/self/exe").string() << "' '" << socket
                      << "' '" << program << "' \"$@\"\n";
  std::filesystem::permissions(path, std::filesystem::perms::owner_all);
}

int run_test(const std::filesystem::path& folder, const std::vector<std::string>& programs, std::vector<std::string> command) {
  const tessera::testing::TemporaryFolder temporary;
  const auto scripts = temporary.path() / "scripts";
  for (const std::filesystem::path program : programs) {
    const auto relative = program.lexically_relative(folder);
    TORCH_CHECK(!relative.empty() && *relative.begin() != "..", program, " is not in ", folder);
    write_script(scripts / relative, temporary.file("socket"), program);
    for (auto path = relative; !path.empty(); path = path.parent_path())
      std::ranges::replace(command, (folder / path).string(), (scripts / path).string());
  }
  std::ranges::replace(command, folder.string(), scripts.string());
  const int listening = listen_at(temporary.file("socket"));
  const pid_t test = tessera::testing::spawn_program(
      command, tessera::testing::variables_of_child({{"TESSERA_TEST_FORKED", programs.at(0)}}), {});
  const int test_ended = static_cast<int>(syscall(SYS_pidfd_open, test, 0));
  serve_all(listening, test_ended);
  int status = 0;
  check(waitpid(test, &status, 0) == test, "wait for the test");
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

/// Ends this process as the program ended.
int end_alike(int status, const sigset_t& blocked) {
  if (!WIFSIGNALED(status)) return WEXITSTATUS(status);
  const rlimit no_core = {};
  setrlimit(RLIMIT_CORE, &no_core);
  std::signal(WTERMSIG(status), SIG_DFL);
  pthread_sigmask(SIG_SETMASK, &blocked, nullptr);
  raise(WTERMSIG(status));
  return 128 + WTERMSIG(status);
}

/// Passes signals on until the program has ended, and returns its status.
int accompany(pid_t program, int connection, int signals) {
  while (true) {
    pollfd awaited[]{{connection, POLLIN, 0}, {signals, POLLIN, 0}};
    if (poll(awaited, 2, -1) < 0) continue;
    signalfd_siginfo signal = {};
    if (awaited[1].revents != 0 && read(signals, &signal, sizeof(signal)) == sizeof(signal))
      kill(program, static_cast<int>(signal.ssi_signo));
    if (awaited[0].revents == 0) continue;
    int status = 0;
    TORCH_CHECK(hear(connection, status), "the process that forks programs has ended");
    return status;
  }
}

int ask(std::string_view path, int argc, char** argv) {
  auto request = tessera::testing::request_of_this_process();
  request.arguments.assign(argv, argv + argc);
  for (char** variable = environ; *variable != nullptr; ++variable) request.variables.emplace_back(*variable);
  request.is_session = getsid(0) == getpid();
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  const int signals = signalfd(-1, &all, SFD_CLOEXEC), connection = make_socket();
  const auto address = address_of(path);
  check(connect(connection, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0, "connect");
  tessera::testing::send_request(connection, request);
  pid_t program = 0;
  TORCH_CHECK(hear(connection, program), "the process that forks programs has ended");
  if (program != 0) return end_alike(accompany(program, connection, signals), request.blocked);
  pthread_sigmask(SIG_SETMASK, &request.blocked, nullptr);
  execv(argv[0], argv);
  check(false, "execute the program");
  return 1;
}

} // namespace

int main(int argc, char** argv) try {
  TORCH_CHECK(argc > 2, "usage: see forked_start.cpp");
  if (std::string_view(argv[1]) == "--beside") {
    char** const command = std::find(argv + 3, argv + argc, std::string_view("--"));
    TORCH_CHECK(argv + 3 < command && command < argv + argc - 1, "usage: see forked_start.cpp");
    return run_test(argv[2], {argv + 3, command}, {command + 1, argv + argc});
  }
  return ask(argv[1], argc - 2, argv + 2);
} catch (const std::exception& error) {
  std::fprintf(stderr, "forked_start: %s\n", error.what());
  return 1;
}
