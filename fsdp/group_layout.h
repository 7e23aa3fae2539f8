#pragma once

// Internal: where the parameters of one group lie in its buffers.

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

#include <tessera/dtensor/placement.h>
#include <tessera/fsdp/options.h>

namespace tessera::fsdp_internal {

/// What a layout needs to know of a parameter. The unsharded dtype is the policy's `param_dtype`, or the parameter's own.
struct ParameterShape {
  std::string name;
  std::vector<int64_t> sizes;
  c10::ScalarType unsharded_dtype = c10::kFloat;

  int64_t numel() const;
};

/// The elements [begin, begin + numel) of a flattened parameter, which one rank owns.
struct Piece {
  int64_t begin = 0;
  int64_t numel = 0;
  int64_t shard_offset = 0; ///< bytes, inside that rank's shard
};

struct ParameterLayout {
  Placement placement;          ///< along the shard dim of the mesh
  std::vector<Piece> pieces;    ///< one a rank
  int64_t unsharded_offset = 0; ///< bytes, inside the unsharded storage

  bool is_replicated() const { return std::holds_alternative<Replicate>(placement); }
};

/// The layout of a group. A rank's shard is `shard_bytes` that it contributes to the all-gather, then `replicated_bytes` for
/// 0-dim parameters, which every rank holds whole. The unsharded storage ends with the 0-dim parameters too.
struct GroupLayout {
  std::vector<ParameterLayout> parameters;
  int64_t shard_bytes = 0;
  int64_t replicated_bytes = 0;
  int64_t unsharded_bytes = 0;
  /// The all-gather's output is the head of the unsharded storage itself; otherwise a copy follows.
  bool gathers_in_place = true;
};

/// Alignment in bytes of a parameter inside a buffer.
inline constexpr int64_t kParameterAlignment = 16;

/// Parameters whole, one after another (veScale's RaggedShard): rank r owns the r-th `shard_bytes` of the unsharded storage. The
/// cuts fall between rows of dim 0 where less than about 1 % of padding allows it, and otherwise inside a row.
GroupLayout plan_ragged(const std::vector<ParameterShape>& parameters, int ranks);

/// Every parameter is split along dim 0 as torch.chunk splits it, rank parts padded to the first one's size (FSDP2).
GroupLayout plan_per_parameter(const std::vector<ParameterShape>& parameters, int ranks);

GroupLayout plan_layout(BufferLayout kind, const std::vector<ParameterShape>& parameters, int ranks);

/// Where the gradients lie in the reduce-scatter's input: rank r's part starts at r × `chunk_numel`, and holds its pieces of the
/// given parameters and one used-flag a parameter. In elements of the reduce dtype.
struct ReduceLayout {
  std::vector<std::vector<int64_t>> offsets; ///< [parameter][rank]; empty for a parameter that takes no part
  int64_t used_offset = 0;
  int64_t chunk_numel = 0;
};

ReduceLayout plan_reduce(const GroupLayout& layout, const std::vector<bool>& takes_part);

} // namespace tessera::fsdp_internal
