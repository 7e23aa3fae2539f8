#pragma once

// Internal: where a rank's parts of a group's parameters lie in its shard.

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include <tessera/fsdp/layout/group_layout.h>

namespace tessera::internal {

/// The dtypes of a parameter.
struct ParameterDtypes {
  c10::ScalarType own;
  c10::ScalarType unsharded; ///< in which forward reads it
  friend bool operator==(const ParameterDtypes&, const ParameterDtypes&) = default;
};

/// Without a cast the shard is the all-gather's input and shares its offsets, and where all are cast alike, element by element.
/// Otherwise the parts are packed on their own.
struct ShardPlan {
  std::vector<int64_t> offsets; ///< bytes, of each part inside the shard
  int64_t bytes = 0;
  bool casts = false;       ///< what is sent is made of the shard, and no part of it
  bool casts_whole = false; ///< all are cast alike, and lie in the shard as in what is sent
};

/// `extends`: the gather of some parameter is extended.
ShardPlan plan_shard(const GroupLayout& layout, const std::vector<ParameterDtypes>& dtypes, bool extends, size_t rank);

} // namespace tessera::internal
