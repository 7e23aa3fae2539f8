#pragma once

#include <tessera/collectives/process_context.h>

#include <cstdint>
#include <string>

#include <tessera/tests/support/sweep.h>

namespace tessera::testing {

inline int64_t world_size() { return process_context().world_size(); }
inline int64_t world_rank() { return process_context().rank(); }
/// Made of `test_seed`, another one on each rank.
inline uint64_t rank_seed() { return uint64_t{1000} * test_seed() + static_cast<uint64_t>(world_rank()); }
inline int64_t last_rank() { return world_size() - 1; }
/// How an error that all ranks have names them.
inline std::string all_ranks() { return world_size() == 1 ? "rank 0" : "all " + std::to_string(world_size()) + " ranks"; }

} // namespace tessera::testing
