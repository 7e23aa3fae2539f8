#pragma once

#include <string>

namespace tessera::internal {

/// The name of this machine, or of the container; "" where it has none.
std::string host_name();
/// Identifies the run of the kernel since its start. Machines may share a name, and clones of one machine this; "" where it
/// cannot be read.
std::string boot_id();

} // namespace tessera::internal
