#pragma once

#include <string>

namespace tessera::internal {

/// Of this machine, or of the container; "" where it has none.
std::string host_name();
/// Of the kernel that runs since its start. Machines may share a name, and clones of one machine this; "" where it cannot be
/// read.
std::string boot_id();

} // namespace tessera::internal
