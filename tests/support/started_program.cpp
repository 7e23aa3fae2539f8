// A program that says how it was started, for forked_programs_test.
//   started_program show ARGUMENT...      prints what it was given
//   started_program exit STATUS           ends in a function with that status
//   started_program raise SIGNAL          is ended by it
//   started_program launch --ranks N      starts ranks that say the same of themselves
//   started_program again --ranks N       starts itself, as the leader of a group, which says what it was given and launches
#include <tessera/collectives/launch.h>

#include <fcntl.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <string>

namespace {

/// Says when it is destroyed.
struct Ends {
  ~Ends() { std::printf("a static object is destroyed\n"); }
};

std::string inherited_descriptors() {
  std::set<int> descriptors;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int descriptor = std::stoi(entry.path().filename().string());
    const int flags = fcntl(descriptor, F_GETFD);
    if (flags >= 0 && (flags & FD_CLOEXEC) == 0) descriptors.insert(descriptor);
  }
  std::string text;
  for (const int descriptor : descriptors) text += " " + std::to_string(descriptor);
  return text;
}

std::string signals() {
  sigset_t blocked;
  pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
  std::string text;
  for (int signal = 1; signal <= SIGRTMAX; ++signal) {
    struct sigaction action = {};
    if (sigismember(&blocked, signal) == 1) text += " " + std::to_string(signal) + " blocked";
    if (sigaction(signal, nullptr, &action) == 0 && action.sa_handler != SIG_DFL)
      text += " " + std::to_string(signal) + " not default";
  }
  return text;
}

void show(int argc, char** argv) {
  rlimit files = {};
  getrlimit(RLIMIT_NOFILE, &files);
  for (int i = 0; i < argc; ++i) std::printf("argument '%s'\n", argv[i]);
  std::set<std::string> variables;
  for (char** variable = environ; *variable != nullptr; ++variable) variables.insert(*variable);
  for (const auto& variable : variables) std::printf("variable %s\n", variable.c_str());
  std::printf("in %s, with descriptors%s of %zu, signals%s\n", std::filesystem::current_path().c_str(),
              inherited_descriptors().c_str(), static_cast<size_t>(files.rlim_cur), signals().c_str());
  std::printf("%s, %s\n", getsid(0) == getpid() ? "leads a session" : "in a session",
              getpgrp() == getpid() ? "leads a group" : "in a group");
  std::fprintf(stderr, "on stderr\n");
}

/// A line that no other process writes into.
void show_rank(int argc, char** argv) {
  std::string arguments;
  for (int i = 1; i < argc; ++i) arguments += std::string(" ") + argv[i];
  const bool is_child = std::to_string(getppid()) == std::getenv("TESSERA_LAUNCH_PARENT");
  std::printf("rank %s of %s,%s, %s, signals%s, %s\n", std::getenv("RANK"), std::getenv("WORLD_SIZE"), arguments.c_str(),
              is_child ? "a child" : "no child", signals().c_str(), std::getenv("STARTED_PROGRAM"));
}

/// Starts the program again, and waits for it.
int start_again(char** argv) {
  setenv("STARTED_AGAIN", "1", 1);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, STDERR_FILENO, STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, STDERR_FILENO, 55);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  pid_t pid = 0;
  if (posix_spawn(&pid, "/proc/self/exe", &actions, &attributes, argv, environ) != 0) return 1;
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  int status = 0;
  return waitpid(pid, &status, 0) == pid && WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

} // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  static const Ends ends;
  if (what == "show") show(argc, argv);
  if (what == "exit") std::exit(std::atoi(argv[2]));
  if (what == "raise") raise(std::atoi(argv[2]));
  if (what == "again" && std::getenv("STARTED_AGAIN") == nullptr) return start_again(argv);
  if (what == "again" && std::getenv("RANK") == nullptr) show(argc, argv);
  if (what == "launch" || what == "again")
    return tessera::launch(*tessera::ranks_from_args(argc, argv), [&] { show_rank(argc, argv); });
  return 0;
}
