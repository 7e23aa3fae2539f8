// A library to load before a program (LD_PRELOAD): the program's main is not run in it, but in the forks that a test asks for
// (forked_programs.h).
#include <c10/util/Exception.h>
#include <tessera/collectives/ranks/job_environment.h>

#include <dlfcn.h>
#include <spawn.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "quick_end.h"
#include "zygote.h"

namespace tessera::testing {

namespace {

using Main = int (*)(int, char**, char**);

Main program_main = nullptr;

/// The connection to the zygote of what this program starts of itself, its ranks for example.
int own_zygote = -1;

/// Of each list of actions, the descriptors that it passes on, which no other function tells.
std::map<const posix_spawn_file_actions_t*, std::map<int, int>> passed_on;

int run(ProcessRequest request) {
  end_without_unloading();
  take_signals(request);
  std::vector<char*> arguments;
  for (auto& text : request.arguments) arguments.push_back(text.data());
  arguments.push_back(nullptr);
  return program_main(static_cast<int>(request.arguments.size()), arguments.data(), environ);
}

bool is_rank(const ProcessRequest& request) {
  const std::string name = std::string(internal::kPipeVariable) + "=";
  return std::ranges::any_of(request.variables, [&](const std::string& variable) { return variable.starts_with(name); });
}

/// Serves until it is a fork, which becomes the program that is asked for, with a zygote of its own unless it is a rank.
/// `arguments` are those of the program that asks for itself: it has read the first zygote's.
int run_forked(int connection, const std::vector<std::string>& arguments = {}) {
  auto request = serve_as_zygote(connection);
  if (!arguments.empty()) request.arguments = arguments;
  if (is_rank(request)) return run(std::move(request));
  const auto own = connect_zygote();
  const pid_t zygote = fork();
  TORCH_CHECK(zygote >= 0, "cannot fork");
  if (zygote == 0) {
    close(own.own);
    return run_forked(own.zygotes, request.arguments);
  }
  close(own.zygotes);
  own_zygote = own.own;
  return run(std::move(request));
}

int forked_main(int argc, char** argv, char** variables) {
  const char* const connection = std::getenv(kZygoteVariable);
  if (connection == nullptr) return program_main(argc, argv, variables);
  try {
    return run_forked(std::atoi(connection));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

pid_t fork_itself(const posix_spawn_file_actions_t* actions, const posix_spawnattr_t& attributes, char* const* variables) {
  auto request = request_of_this_process();
  short flags = 0;
  posix_spawnattr_getflags(&attributes, &flags);
  if ((flags & POSIX_SPAWN_SETSIGMASK) != 0) posix_spawnattr_getsigmask(&attributes, &request.blocked);
  request.is_group = (flags & POSIX_SPAWN_SETPGROUP) != 0;
  for (; *variables != nullptr; ++variables) request.variables.emplace_back(*variables);
  if (const auto found = passed_on.find(actions); found != passed_on.end())
    for (const auto& [number, own] : found->second) request.descriptors[number] = own;
  const pid_t pid = fork_from_zygote(own_zygote, request);
  if (request.is_group) setpgid(pid, pid); // it may not have come to that
  return pid;
}

template <typename Function>
Function* libcs(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

} // namespace

} // namespace tessera::testing

// These stand before libc's in the program.

// NOLINTNEXTLINE(bugprone-reserved-identifier,readability-identifier-naming)
extern "C" __attribute__((visibility("default"))) int __libc_start_main(tessera::testing::Main main, int argc, char** argv,
                                                                        void (*init)(), void (*fini)(), void (*rtld_fini)(),
                                                                        void* stack_end) {
  tessera::testing::program_main = main;
  return tessera::testing::libcs<decltype(__libc_start_main)>("__libc_start_main")(tessera::testing::forked_main, argc, argv,
                                                                                   init, fini, rtld_fini, stack_end);
}

extern "C" __attribute__((visibility("default"))) int posix_spawn(pid_t* pid, const char* path,
                                                                  const posix_spawn_file_actions_t* actions,
                                                                  const posix_spawnattr_t* attributes, char* const* arguments,
                                                                  char* const* variables) {
  if (tessera::testing::own_zygote < 0 || std::strcmp(path, "/proc/self/exe") != 0)
    return tessera::testing::libcs<decltype(posix_spawn)>("posix_spawn")(pid, path, actions, attributes, arguments, variables);
  try {
    *pid = tessera::testing::fork_itself(actions, *attributes, variables);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return EAGAIN;
  }
}

extern "C" __attribute__((visibility("default"))) int posix_spawn_file_actions_adddup2(posix_spawn_file_actions_t* actions,
                                                                                       int descriptor, int number) {
  tessera::testing::passed_on[actions][number] = descriptor;
  return tessera::testing::libcs<decltype(posix_spawn_file_actions_adddup2)>("posix_spawn_file_actions_adddup2")(
      actions, descriptor, number);
}

extern "C" __attribute__((visibility("default"))) int posix_spawn_file_actions_destroy(posix_spawn_file_actions_t* actions) {
  tessera::testing::passed_on.erase(actions);
  return tessera::testing::libcs<decltype(posix_spawn_file_actions_destroy)>("posix_spawn_file_actions_destroy")(actions);
}
