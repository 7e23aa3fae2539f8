// A library to load before a program (LD_PRELOAD): the program's main is not run in it, but in the forks that a test asks for
// (forked_programs.h).
#include <c10/util/Exception.h>
#include <tessera/collectives/ranks/job_environment.h>

#include <dlfcn.h>
#include <spawn.h>
#include <unistd.h>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "quick_end.h"
#include "zygote.h"

namespace tessera::testing {

namespace {

using Main = int (*)(int, char**, char**);

Main program_main = nullptr;

/// The connection to the zygote of this program's ranks.
int zygote_of_ranks = -1;

int run(ProcessRequest request) {
  end_without_unloading();
  take_signals(request);
  std::vector<char*> arguments;
  for (auto& text : request.arguments) arguments.push_back(text.data());
  arguments.push_back(nullptr);
  return program_main(static_cast<int>(request.arguments.size()), arguments.data(), environ);
}

int run_forked(int connection) {
  auto job = serve_as_zygote(connection);
  const auto ranks = connect_zygote();
  const pid_t zygote = fork();
  TORCH_CHECK(zygote >= 0, "cannot fork");
  if (zygote != 0) {
    close(ranks.zygotes);
    zygote_of_ranks = ranks.own;
    return run(std::move(job));
  }
  close(ranks.own);
  auto rank = serve_as_zygote(ranks.zygotes);
  rank.arguments = std::move(job.arguments); // which `launch` has read as those of this process, the first zygote's
  return run(std::move(rank));
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

pid_t fork_rank(const posix_spawnattr_t& attributes, char* const* variables) {
  auto request = request_of_this_process();
  short flags = 0;
  posix_spawnattr_getflags(&attributes, &flags);
  if ((flags & POSIX_SPAWN_SETSIGMASK) != 0) posix_spawnattr_getsigmask(&attributes, &request.blocked);
  const std::string pipe = std::string(internal::kPipeVariable) + "=";
  for (; *variables != nullptr; ++variables) {
    const std::string_view variable = request.variables.emplace_back(*variables);
    if (!variable.starts_with(pipe)) continue;
    const int descriptor = std::atoi(variable.data() + pipe.size()); // which posix_spawn's actions would pass on
    request.descriptors[descriptor] = descriptor;
  }
  return fork_from_zygote(zygote_of_ranks, request);
}

template <typename Function>
Function* libcs(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

} // namespace

} // namespace tessera::testing

// These two stand before libc's in the program.

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
  if (tessera::testing::zygote_of_ranks < 0 || std::strcmp(path, "/proc/self/exe") != 0)
    return tessera::testing::libcs<decltype(posix_spawn)>("posix_spawn")(pid, path, actions, attributes, arguments, variables);
  try {
    *pid = tessera::testing::fork_rank(*attributes, variables);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return EAGAIN;
  }
}
