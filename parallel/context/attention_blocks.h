#pragma once

// Internal: which queries see which keys, as rectangles.

#include <cstdint>
#include <vector>

#include <tessera/mesh/part_order.h>

namespace tessera::internal {

/// Queries that see keys: all of these, or where `is_causal`, in which case both ranges are one, those at their own position and
/// before.
struct AttentionBlock {
  PositionRange query, key;
  bool is_causal = false;
  bool operator==(const AttentionBlock&) const = default;
};

/// The blocks of some queries and some keys, none of them empty. `documents`: the bounds of documents, inside which queries see
/// keys; empty for one document.
std::vector<AttentionBlock> blocks_between(const PositionRange& query, const PositionRange& key, bool is_causal,
                                           const std::vector<int64_t>& documents);

} // namespace tessera::internal
