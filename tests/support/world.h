#pragma once

#include <tessera/collectives/process_context.h>

#include <string>

namespace tessera::testing {

inline int64_t world_size() { return process_context().world_size(); }
inline int64_t world_rank() { return process_context().rank(); }
inline int64_t last_rank() { return world_size() - 1; }
/// How an error that all ranks have names them.
inline std::string all_ranks() { return world_size() == 1 ? "rank 0" : "all " + std::to_string(world_size()) + " ranks"; }

} // namespace tessera::testing
