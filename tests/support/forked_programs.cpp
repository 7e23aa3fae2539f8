#include "forked_programs.h"

#include <unistd.h>
#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <mutex>
#include <string_view>

#include "sanitized.h"
#include "spawn_program.h"
#include "zygote.h"

namespace tessera::testing {

namespace {

/// How the names of variables begin that are read before main. The last is the library's: a rank that is traced learns there to
/// admit SIGUSR1.
constexpr std::array<std::string_view, 8> kReadAtLoad{"LD_",   "GLIBC_", "MALLOC_", "OMP_",
                                                      "GOMP_", "MKL_",   "TORCH_",  "TESSERA_TRACE_"};

std::vector<std::string> read_at_load(const std::vector<std::string>& variables) {
  std::vector<std::string> read;
  std::ranges::copy_if(variables, std::back_inserter(read), [](const std::string& variable) {
    return std::ranges::any_of(kReadAtLoad, [&](std::string_view name) { return variable.starts_with(name); });
  });
  std::ranges::sort(read);
  return read;
}

struct Zygote {
  int connection;
  std::vector<std::string> read_at_load; ///< in order
};

/// Those of a process: its forks have none at first.
struct Zygotes {
  pid_t process = 0;
  std::map<std::string, Zygote> of_programs;
};

Zygote start_zygote(const std::string& program) {
  const auto connection = connect_zygote();
  const auto variables =
      variables_of_child({{kZygoteVariable, std::to_string(connection.zygotes)}, {"LD_PRELOAD", TESSERA_PRELOADED_MAIN}});
  spawn_program({program}, variables, {{connection.zygotes, connection.zygotes}});
  close(connection.zygotes);
  return {connection.own, read_at_load(variables_of_child({}))};
}

const Zygote& zygote_of(const std::string& program) {
  static Zygotes zygotes;
  if (zygotes.process != getpid()) zygotes = {.process = getpid(), .of_programs = {}};
  const auto found = zygotes.of_programs.find(program);
  return found != zygotes.of_programs.end() ? found->second
                                            : zygotes.of_programs.emplace(program, start_zygote(program)).first->second;
}

std::mutex one_at_a_time; // a zygote's answers come in the order of the requests

} // namespace

bool may_be_forked(const std::string& program, const std::vector<std::string>& variables) {
  if (kIsSanitized) return false;
  const std::lock_guard lock(one_at_a_time);
  return zygote_of(program).read_at_load == read_at_load(variables);
}

pid_t fork_program(const ProcessRequest& request) {
  const std::lock_guard lock(one_at_a_time);
  return fork_from_zygote(zygote_of(request.arguments.at(0)).connection, request);
}

} // namespace tessera::testing
