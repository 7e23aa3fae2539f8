#pragma once

// Internal: where something is registered.

#include <cstddef>
#include <string>

namespace tessera::internal {

/// The place of a module or a parameter below one of several modules.
struct Place {
  size_t top = 0;   ///< which of these
  std::string path; ///< from there: "blocks.0"
};

} // namespace tessera::internal
