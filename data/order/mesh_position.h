#pragma once

// Internal: where this rank stands among those that have different data.

#include <algorithm>
#include <cstdint>

#include <tessera/collectives/process_context.h>
#include <tessera/mesh/device_mesh.h>

namespace tessera::internal {

/// This rank's position in `mesh.ranks()`; an error, begun with `what`, for a rank outside of it.
inline int64_t position_in(const DeviceMesh& mesh, const char* what) {
  const auto rank = process_context().rank();
  const auto& ranks = mesh.ranks();
  const auto found = std::find(ranks.begin(), ranks.end(), rank);
  TORCH_CHECK_VALUE(found != ranks.end(), what, ": rank ", rank, " is not in ", mesh.to_string());
  return found - ranks.begin();
}

} // namespace tessera::internal
