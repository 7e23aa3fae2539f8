#pragma once

// Internal: "500 steps", "3 epochs", "30 min".

#include <string>
#include <vector>

#include <tessera/training/trainer_options.h>

namespace tessera::internal {

/// Steps or a time, or one of each. `key` is for errors: a number that is not positive, an unknown unit, a unit twice.
Every every_of(const std::vector<std::string>& texts, const std::string& key);
/// Steps, epochs, a time: at most one of each.
StopAfter stop_after_of(const std::vector<std::string>& texts, const std::string& key);

} // namespace tessera::internal
