#pragma once

#include <tessera/plan/machine.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tools {

/// The names of the published machines, sorted.
std::vector<std::string> machine_names();

/// A machine by the name of a published one, or of a file. An error for what is neither, with the nearest name.
tessera::Machine machine_of(const std::string& name_or_file);

/// The machine with so many ranks, of which whole hosts may be more than it has; 0: as it is.
tessera::Machine with_ranks(const tessera::Machine& machine, int64_t ranks);

} // namespace tools
