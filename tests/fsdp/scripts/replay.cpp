#include "replay.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <sstream>

namespace tessera::testing::scripts {
namespace {

std::set<std::string> names_in(const char* variable) {
  std::set<std::string> found;
  std::istringstream names(std::getenv(variable) != nullptr ? std::getenv(variable) : "");
  for (std::string name; std::getline(names, name, ',');) found.insert(name);
  return found;
}

} // namespace

const Replay& Replay::from_environment() {
  static const Replay replay = [] {
    Replay made;
    if (const char* script = std::getenv("TESSERA_SCRIPT")) made.script = std::stoull(script);
    if (const char* range = std::getenv("TESSERA_SCRIPTS")) {
      char* end = nullptr;
      const size_t first = std::strtoull(range, &end, 10);
      TORCH_CHECK(*end == '-', "TESSERA_SCRIPTS is no range like 500-999: ", range);
      made.range = {first, std::stoull(end + 1)};
    }
    if (const char* steps = std::getenv("TESSERA_SCRIPT_STEPS")) made.steps = std::stoll(steps);
    made.without = names_in("TESSERA_SCRIPT_WITHOUT");
    made.often = names_in("TESSERA_SCRIPT_OFTEN");
    made.shrinks = std::getenv("TESSERA_SCRIPT_SHRINK") != nullptr;
    return made;
  }();
  return replay;
}

} // namespace tessera::testing::scripts
