#include "replay.h"

#include <cstdlib>
#include <sstream>

namespace tessera::testing::scripts {

const Replay& Replay::from_environment() {
  static const Replay replay = [] {
    Replay made;
    if (const char* script = std::getenv("TESSERA_SCRIPT")) made.script = std::stoull(script);
    if (const char* steps = std::getenv("TESSERA_SCRIPT_STEPS")) made.steps = std::stoll(steps);
    if (const char* without = std::getenv("TESSERA_SCRIPT_WITHOUT")) {
      std::istringstream names(without);
      for (std::string name; std::getline(names, name, ',');) made.without.insert(name);
    }
    made.shrinks = std::getenv("TESSERA_SCRIPT_SHRINK") != nullptr;
    return made;
  }();
  return replay;
}

} // namespace tessera::testing::scripts
