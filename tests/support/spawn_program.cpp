#include "spawn_program.h"

#include <c10/util/Exception.h>

#include <spawn.h>
#include <unistd.h>
#include <cstring>
#include <string_view>

namespace tessera::testing {

namespace {

std::vector<char*> c_strings(const std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (const auto& text : texts) result.push_back(const_cast<char*>(text.c_str()));
  result.push_back(nullptr);
  return result;
}

} // namespace

std::vector<std::string> variables_of_child(const std::map<std::string, std::string>& additions) {
  std::map<std::string, std::string> environment;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string_view text = *variable;
    if (const auto end = text.find('='); end != std::string_view::npos)
      environment.emplace(text.substr(0, end), text.substr(end + 1));
  }
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
                           "TORCHELASTIC_USE_AGENT_STORE", "TESSERA_LAUNCH_PIPE", "TESSERA_LAUNCH_PARENT"})
    environment.erase(name);
  for (const auto& [name, value] : additions) environment[name] = value;
  std::vector<std::string> variables;
  for (const auto& [name, value] : environment) variables.push_back(name + "=" + value);
  return variables;
}

pid_t spawn_program(const std::vector<std::string>& arguments, const std::vector<std::string>& variables,
                    const std::map<int, int>& descriptors) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  for (const auto& [number, own] : descriptors) posix_spawn_file_actions_adddup2(&actions, own, number);
  pid_t pid = 0;
  const int error =
      posix_spawnp(&pid, arguments[0].c_str(), &actions, nullptr, c_strings(arguments).data(), c_strings(variables).data());
  posix_spawn_file_actions_destroy(&actions);
  TORCH_CHECK(error == 0, "cannot start ", arguments[0], ": ", std::strerror(error));
  return pid;
}

} // namespace tessera::testing
