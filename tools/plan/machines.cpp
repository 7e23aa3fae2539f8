#include "machines.h"

#include <absl/strings/str_join.h>
#include <c10/util/Exception.h>
#include <tessera/base/edit_distance.h>
#include <tessera/collectives/process_context.h>

#include <filesystem>

#include <published_machines.h>

namespace tools {

std::vector<std::string> machine_names() {
  std::vector<std::string> names;
  for (const auto& [name, text] : kPublishedMachines) names.emplace_back(name);
  return names;
}

tessera::Machine machine_of(const std::string& name_or_file) {
  for (const auto& [name, text] : kPublishedMachines) {
    if (name_or_file == name) return tessera::Machine::from_json(text, name_or_file);
  }
  const auto names = machine_names();
  TORCH_CHECK_VALUE(std::filesystem::exists(name_or_file), "--machine: there is no file ", name_or_file,
                    ", and no machine of this name; the nearest is ", tessera::internal::nearest_of(name_or_file, names),
                    ", all are: ", absl::StrJoin(names, ", "));
  return tessera::Machine::read(name_or_file);
}

tessera::Machine with_ranks(const tessera::Machine& machine, int64_t ranks) {
  TORCH_CHECK_VALUE(ranks >= 0, "--ranks: ", ranks);
  return ranks == 0 ? machine : machine.with_ranks(ranks);
}

} // namespace tools
