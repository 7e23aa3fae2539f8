#include "forkable_main.h"

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

/// The connection to the zygote of this program's ranks.
int zygote_of_ranks = -1;

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (auto& text : texts) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

int run(int (*program)(int, char**), ProcessRequest request) {
  end_without_unloading();
  take_signals(request);
  auto arguments = pointers(request.arguments);
  return program(static_cast<int>(request.arguments.size()), arguments.data());
}

int run_forked(int connection, int (*program)(int, char**)) {
  const auto job = serve_as_zygote(connection);
  const auto ranks = connect_zygote();
  const pid_t zygote = fork();
  TORCH_CHECK(zygote >= 0, "cannot fork");
  if (zygote != 0) {
    close(ranks.zygotes);
    zygote_of_ranks = ranks.own;
    return run(program, job);
  }
  close(ranks.own);
  auto rank = serve_as_zygote(ranks.zygotes);
  rank.arguments = job.arguments; // which `launch` has read as those of this process, the first zygote's
  return run(program, std::move(rank));
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

} // namespace

int forkable_main(int argc, char** argv, int (*program)(int, char**)) {
  const char* const connection = std::getenv(kZygoteVariable);
  if (connection == nullptr) return program(argc, argv);
  try {
    return run_forked(std::atoi(connection), program);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

} // namespace tessera::testing

// Stands before libc's in the program.
extern "C" __attribute__((visibility("default"))) int posix_spawn(pid_t* pid, const char* path,
                                                                  const posix_spawn_file_actions_t* actions,
                                                                  const posix_spawnattr_t* attributes, char* const* arguments,
                                                                  char* const* variables) {
  if (tessera::testing::zygote_of_ranks < 0 || std::strcmp(path, "/proc/self/exe") != 0) {
    static const auto libcs = reinterpret_cast<decltype(&posix_spawn)>(dlsym(RTLD_NEXT, "posix_spawn"));
    return libcs(pid, path, actions, attributes, arguments, variables);
  }
  try {
    *pid = tessera::testing::fork_rank(*attributes, variables);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return EAGAIN;
  }
}
